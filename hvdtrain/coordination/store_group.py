"""The workers of a job of which none may be lost: what they agree on goes through the store of all ranks."""

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import Store

from hvdtrain.coordination.group import Group
from hvdtrain.errors import Failure
from hvdtrain.wire.rendezvous import lacking, leave
from hvdtrain.world.place import World


class StoreGroup(Group):
    """Workers meet in rounds. In each, every worker has a key with what it gives, and waits for those of the others.

    Args:
        store: that all ranks share; None where there is one worker.
        timeout: seconds that a worker waits for the others.
        leave_data: leaves what carries the gradients.
    """

    def __init__(
        self, world: World, store: Store | None = None, timeout: float = 0.0,
        leave_data: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(world)
        self.world, self.store, self.timeout, self.leave_data = world, store, timeout, leave_data
        self.in_background = self.workers > 1
        self._round = 0

    def sum_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        rows = self._rows_later(values)
        return lambda: rows().sum(0)

    def all_gather_later(self, row: Sequence[float]) -> Callable[[], tuple[list[int], torch.Tensor]]:
        rows = self._rows_later(torch.tensor(row, dtype=torch.float64))
        return lambda: (list(range(self.workers)), rows())

    def _rows_later(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What each worker gives, [workers, *values.shape], in two steps."""
        keys, given = self._give(values.numpy().tobytes()), values.numpy()

        def wait() -> torch.Tensor:
            if not keys:
                return values[None]
            content = bytearray(b"".join(self._take(keys)))
            return torch.from_numpy(np.frombuffer(content, given.dtype).reshape(self.workers, *given.shape))

        return wait

    def gather_to_first(self, value: Any) -> dict[int, Any]:
        keys = self._give(json.dumps(value).encode())
        if not keys:
            return {0: value}
        if self.leads:
            return dict(enumerate(map(json.loads, self._take(keys))))
        self._wait(keys)
        return {}

    def close(self) -> None:
        if self.store:
            everybody = range(self.world.size)
            leave(self.world.rank, self.store, self.timeout, everybody, everybody)
        self.leave_data()

    def _give(self, message: bytes) -> list[str]:
        """Begin a round with this message; the keys of all workers' in it. None where this worker is alone."""
        if not self.store:
            return []
        self._round += 1
        self.store.set(_key(self._round, self.worker), cast(Any, message))  # bytes it takes too
        # All have read that: each gives to a round when it is through the last but one, as sum_later allows.
        if self._round > 4:
            self.store.delete_key(_key(self._round - 4, self.worker))
        return [_key(self._round, worker) for worker in range(self.workers)]

    def _take(self, keys: Sequence[str]) -> list[bytes]:
        """The messages of all workers, when they are there."""
        self._wait(keys)
        return self.store.multi_get(list(keys)) if self.store else []

    def _wait(self, keys: Sequence[str]) -> None:
        """Return when these are there.

        Raises:
            Failure: some did not come in time, or nobody serves the store any more.
        """
        if not self.store:
            return
        try:
            missing = lacking(self.store, dict(enumerate(keys)), self.timeout)
        except RuntimeError:
            raise Failure("rank 0, which serves the store of all ranks, ended before the others") from None
        if missing:
            raise Failure(
                f"workers {missing} did not come to where the others wait for them within {self.timeout:g} s "
                "(see --timeout)"
            )


def _key(number: int, worker: int) -> str:
    return f"round/{number}/{worker}"
