"""The meeting of all ranks before they prepare.

Limits on waits then count what the waits are for, and not how long a rank looks at its images.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from hvdtrain.base.errors import Failure
from hvdtrain.base.system.variables import seconds
from hvdtrain.base.world.place import World
from hvdtrain.job.wire.heartbeat import StoreLost, wait_for_ranks, while_served
from hvdtrain.job.wire.rendezvous import open_store

if TYPE_CHECKING:
    from torch.distributed import Store

MEETING_S = "HVDTRAIN_MEETING_S"  # a variable, for ranks that start minutes apart


class Meeting:
    """All ranks of a job, from when they have met until each is ready to begin.

    Args:
        world: where this rank is.
        timeout: seconds after which a silent rank is lost. All ranks come within as many, or within
            MEETING_S of the environment.

    Attributes:
        store: the store that all ranks share.

    Raises:
        Failure: not all ranks came, or the first one has ended.
    """

    def __init__(self, world: World, timeout: float) -> None:
        self.world = world
        self.timeout = timeout
        within = max(timeout, seconds(os.environ, MEETING_S))
        try:
            self.store: Store = open_store(world, timeout, within)
            everybody = [f"came/{rank}" for rank in range(world.size)]
            with _served_until_training():
                self.store.set(f"came/{world.rank}", "")
                self.store.wait(everybody, timedelta(seconds=within))
        except RuntimeError:
            raise Failure(
                f"rank {world.rank} did not find all {world.size} ranks within {within:g} s "
                "(see --timeout)"
            ) from None

    def wait_until_all_are_ready(self) -> None:
        """Blocks until all ranks have called this, however long that takes.

        Raises:
            Failure: a rank was lost before.
        """
        ready = {rank: f"ready/{rank}" for rank in range(self.world.size)}
        with _served_until_training():
            self.store.set(f"ready/{self.world.rank}", "")
            wait_for_ranks(self.store, ready, self.timeout, self.world.rank)


@contextmanager
def _served_until_training() -> Iterator[None]:
    """Raises Failure in the block where the first rank has ended."""
    try:
        with while_served():
            yield
    except StoreLost:
        raise Failure(
            "rank 0, which serves the store of all ranks, ended before training began"
        ) from None
