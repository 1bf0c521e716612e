"""The workers of a job that none may leave, as a group: they agree through a store."""

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import Store

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.group import Group
from hvdtrain.job.wire.heartbeat import wait_for_ranks, while_served
from hvdtrain.job.wire.messages import UNLIKE
from hvdtrain.job.wire.rendezvous import leave


class StoreGroup(Group):
    """A group that meets in rounds: each worker sets a key in the store, and reads all others'.

    Args:
        world: this worker's place.
        store: the store that all ranks share; None where there is one worker.
        timeout: seconds after which a silent worker is lost.
        leave_data: leaves what carries the gradients.
    """

    def __init__(
        self,
        world: World,
        store: Store | None = None,
        timeout: float = 0.0,
        leave_data: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(world)
        self.world = world
        self.store = store
        self.timeout = timeout
        self.leave_data = leave_data
        self.in_background = self.workers > 1
        self._round = 0

    def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        rows = self._rows_later(values)
        return lambda: rows().sum(0)

    def all_gather_later(
        self, row: Sequence[float]
    ) -> Callable[[], tuple[list[int], torch.Tensor]]:
        rows = self._rows_later(torch.tensor(row, dtype=torch.float64))
        return lambda: (list(range(self.workers)), rows())

    def _rows_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Gives values to the others.

        Returns:
            A function that waits for the others and returns [workers, *values.shape]. It raises
            Failure if another worker gave values of another size.
        """
        given = values.numpy()
        keys = self._give(given.tobytes())

        def wait() -> torch.Tensor:
            if not keys:
                return values[None]
            messages = self._take(keys)
            if any(len(message) != given.nbytes for message in messages):
                raise Failure(UNLIKE)
            content = bytearray(b"".join(messages))
            rows = np.frombuffer(content, given.dtype)
            return torch.from_numpy(rows.reshape(self.workers, *given.shape))

        return wait

    def gather_to_first(self, value: Any) -> dict[int, Any]:
        keys = self._give(json.dumps(value).encode())
        if not keys:
            return {0: value}
        if self.leads:
            messages = self._take(keys)
            try:
                values = [json.loads(message) for message in messages]
            except ValueError:
                raise Failure(UNLIKE) from None
            return dict(enumerate(values))
        self._wait(keys)
        return {}

    def close(self) -> None:
        if self.store:
            everybody = range(self.world.size)
            leave(self.world.rank, self.store, self.timeout, everybody, everybody)
        self.leave_data()

    def _give(self, message: bytes) -> list[str]:
        """Begins a round with this message.

        Returns:
            The keys of all workers' messages; empty where this worker is alone.
        """
        if not self.store:
            return []
        self._round += 1
        own_key = _key(self._round, self.worker)
        with while_served():
            self.store.set(own_key, cast(Any, message))  # the store takes bytes too
            # All workers have read the message of four rounds ago: each begins a round when it is
            # through the last but one, as sum_later allows.
            if self._round > 4:
                self.store.delete_key(_key(self._round - 4, self.worker))
        return [_key(self._round, worker) for worker in range(self.workers)]

    def _take(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the messages of all workers, when they are there."""
        if not self.store:
            return []
        self._wait(keys)
        with while_served():
            return self.store.multi_get(list(keys))

    def _wait(self, keys: Sequence[str]) -> None:
        """Blocks until these keys are there.

        Raises:
            Failure: some workers are silent, or nobody serves the store any more.
        """
        if self.store:
            wait_for_ranks(self.store, dict(enumerate(keys)), self.timeout, self.worker)


def _key(number: int, worker: int) -> str:
    return f"round/{number}/{worker}"
