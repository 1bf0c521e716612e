"""The workers of a job with parameter servers as a group: rank 0, a server, adds up for them."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import Store

from hvdtrain.base.formatting import in_minutes
from hvdtrain.base.system.terminal import tell
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.group import Group
from hvdtrain.job.wire.heartbeat import TOLD_AFTER, named
from hvdtrain.job.wire.wire import Wire


class ServerGroup(Group):
    """A group whose sums are over the workers that are there: none waits for a lost worker.

    Args:
        wire: carries calls to the servers.
        world: this worker's place.
        store: the store that all ranks share.
        timeout: seconds after which a silent rank is lost.
        servers_return: servers that are killed come back, the first one with an empty store.

    Attributes:
        sums: how many sums the workers have begun.
    """

    in_background = True

    def __init__(
        self, wire: Wire, world: World, store: Store, timeout: float, servers_return: bool = False
    ) -> None:
        super().__init__(world)
        self.wire = wire
        self.servers_return = servers_return
        self.world = world
        self.store = store
        self.timeout = timeout
        self.sums = 0

    def retry_if_first_lost(self, act: Callable[[], None]) -> None:
        first = -1
        while first != self.first:
            self.all_gather([])
            first = self.first
            act()
            self.all_gather([])

    def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins a sum; see Group.

        Raises:
            Failure: the first server is lost. The function that is returned raises it too.
        """
        return self._later(values, as_rows=False)

    def all_gather_later(
        self, row: Sequence[float]
    ) -> Callable[[], tuple[list[int], torch.Tensor]]:
        """Begins an all_gather; see Group.

        Raises:
            Failure: the first server is lost. The function that is returned raises it too.
        """
        own_row = torch.tensor([self.worker, *row], dtype=torch.float64)
        rows_later = self._later(own_row, as_rows=True)

        def wait() -> tuple[list[int], torch.Tensor]:
            rows = rows_later()
            workers = rows[:, 0].int().tolist()
            self.first = workers[0]
            return workers, rows[:, 1:]

        return wait

    def _later(self, values: torch.Tensor, as_rows: bool) -> Callable[[], torch.Tensor]:
        self.sums += 1
        number = self.sums
        answer = self.wire.call(0, "sum", self.worker, number, values, as_rows)
        tell_of_missing = partial(self._tell_of_missing, number)
        return lambda: self.wire.result(0, answer, tell_of_missing, TOLD_AFTER * self.timeout)

    def _tell_of_missing(self, number: int, waited_s: float) -> None:
        """Shows the user which workers a sum waits for, where this worker is the one to say it."""
        missing = self.wire.ask(0, "missing", self.worker, number)
        if missing:
            ranks = [self.world.servers + worker for worker in missing]
            tell(f"waiting for {named(ranks)}, alive, for {in_minutes(waited_s)}")

    def gather_to_first(self, value: Any) -> dict[int, Any]:
        """Returns each worker's value on the one that leads; see Group.

        Rank 0 keeps two notes of each worker, by the parity of the number of sums. A worker that
        writes over a note has been through a sum with the leading worker since that read it.
        """
        slot = self.sums % 2
        self.wire.ask(0, "note", slot, self.worker, json.dumps(value))
        workers, _ = self.all_gather([])
        if not self.leads:
            return {}
        noted = self.wire.ask(0, "noted", slot)
        return {worker: json.loads(noted[worker]) for worker in workers}

    def close(self) -> None:
        if self.servers_return:
            self.wire.leave_servers(range(self.world.servers), self.worker)
        else:
            self.wire.leave_together(self.world, self.store, self.timeout)
