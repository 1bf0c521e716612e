"""The workers of a job with parameter servers as a group: rank 0, a server, adds up what they agree on."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import Store

from hvdtrain.coordination.group import Group
from hvdtrain.errors import Failure
from hvdtrain.wire.wire import Wire
from hvdtrain.world.place import World

QUESTION_S = 5.0  # the longest wait for a reason, when something has failed already


class ServerGroup(Group):
    """Sums are over the workers that are there: one that is lost is not waited for.

    Args:
        timeout: seconds after which a silent rank is lost.
        servers_return: servers that are killed come back, the first one with an empty store.
    """

    in_background = True

    def __init__(self, wire: Wire, world: World, store: Store, timeout: float, servers_return: bool = False) -> None:
        super().__init__(world)
        self.wire = wire
        self.servers_return = servers_return
        self.world, self.store, self.timeout = world, store, timeout
        self.sums = 0  # so far, of all workers together

    def retry_if_first_lost(self, act: Callable[[], None]) -> None:
        first = -1
        while first != self.first:
            self.all_gather([])
            first = self.first
            act()
            self.all_gather([])

    def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As in Group.

        Raises, as does what is returned:
            Failure: a worker that is there neither came nor pushed anything for as long as waits may take.
        """
        return self._later(values, as_rows=False)

    def all_gather_later(self, row: Sequence[float]) -> Callable[[], tuple[list[int], torch.Tensor]]:
        """As in Group, of whoever is there; what is returned raises as sum does."""
        rows_later = self._later(torch.tensor([self.worker, *row], dtype=torch.float64), as_rows=True)

        def wait() -> tuple[list[int], torch.Tensor]:
            rows = rows_later()
            workers = rows[:, 0].int().tolist()
            self.first = workers[0]
            return workers, rows[:, 1:]

        return wait

    def _later(self, values: torch.Tensor, as_rows: bool) -> Callable[[], torch.Tensor]:
        self.sums += 1
        number = self.sums
        first = self.wire.call(0, "sum", self.worker, number, values, as_rows)

        def wait() -> torch.Tensor:
            answer = first
            while True:
                try:
                    return self.wire.result(0, answer)
                except Failure:
                    question = "missing", self.worker, number, self.wire.patience
                    missing, silent = self.wire.ask(0, *question, timeout=QUESTION_S)
                    if not missing:  # the last one has come meanwhile, or what goes wrong does so again
                        return self.wire.ask(0, "sum", self.worker, number, values, as_rows)
                    if silent:
                        ranks = [self.world.servers + worker for worker in silent]
                        problem = f"ranks {ranks} hang: they did not come to where the others wait for them"
                        raise Failure(problem) from None
                answer = self.wire.call(0, "sum", self.worker, number, values, as_rows)

        return wait

    def gather_to_first(self, value: Any) -> dict[int, Any]:
        """As in Group. Of each worker rank 0 keeps two notes, by the parity of the number of sums so far: who writes
        over one has been through a sum with the one that leads since that read it.
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
