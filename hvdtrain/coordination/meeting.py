"""Ranks meet before they prepare: limits on waits count what they are for, not how long one looks at its images."""

import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from hvdtrain.errors import Failure
from hvdtrain.wire.rendezvous import lacking, open_store
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store

MEETING_S = "HVDTRAIN_MEETING_S"  # where ranks may start minutes apart
BEAT_S = 1.0  # how often a rank that prepares says that it is there
ENDS_S = 2.0  # within which a starter ends the job of a rank that has failed, which has said why


class Meeting:
    """All ranks of a job, from when they have met until each is ready to begin, however long that takes.

    Until then a thread of each renews a key in the store that they share.

    Attributes:
        store: which they go on with.

    Args:
        timeout: seconds after which a rank that is silent is lost; within as many, or MEETING_S of the environment, all
            come.

    Raises:
        Failure: not all came.
    """

    def __init__(self, world: World, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        within = max(timeout, float(os.environ.get(MEETING_S, 0)))
        self._every = min(BEAT_S, timeout / 4)
        self._is_ready = threading.Event()
        try:
            self.store: Store = open_store(world, within)
            self._beat(0)
            self.store.wait([_alive(rank) for rank in range(world.size)], timedelta(seconds=within))
        except RuntimeError:
            raise Failure(
                f"rank {world.rank} did not find all {world.size} ranks within {within:g} s (see --timeout)"
            ) from None
        threading.Thread(target=self._go_on_beating, daemon=True, name="beats").start()

    def wait_until_all_are_ready(self) -> None:
        """Be ready, and return when all are. Failure where one is lost before that."""
        self._is_ready.set()
        keys = {rank: f"ready/{rank}" for rank in range(self.world.size)}
        seen: dict[int, tuple[bytes, int]] = {}  # what a rank said last, and how often it was found unchanged
        try:
            self.store.set(keys[self.world.rank], "")
            while missing := lacking(self.store, keys, self._every):
                beats = self.store.multi_get([_alive(rank) for rank in missing])
                for rank, beat in zip(missing, beats, strict=True):
                    before, times = seen.get(rank, (beat, 0))
                    seen[rank] = (beat, times + 1 if beat == before else 0)
                    # Looks are counted, not seconds: a job that was suspended as a whole goes on.
                    if seen[rank][1] * self._every > self.timeout:
                        raise Failure(
                            f"rank {rank} was lost before training began: no sign of life within {self.timeout:g} s "
                            "(see --timeout)"
                        )
        except RuntimeError:
            time.sleep(ENDS_S)
            raise Failure("rank 0, which serves the store of all ranks, ended before training began") from None

    def _beat(self, number: int) -> None:
        self.store.set(_alive(self.world.rank), str(number))

    def _go_on_beating(self) -> None:
        number = 0
        with suppress(RuntimeError):  # who serves the store has ended
            while not self._is_ready.wait(self._every):
                number += 1
                self._beat(number)


def _alive(rank: int) -> str:
    return f"alive/{rank}"
