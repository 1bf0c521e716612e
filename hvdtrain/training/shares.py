"""Which shares of an epoch a worker trains on: always its own, or whichever is next when it is ready."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from hvdtrain.data.sampling import BatchSampler, Share
from hvdtrain.ps.worker import PushPull


class StaticShares:
    """This worker's own share of every global batch."""

    leased = False

    def __init__(self, sampler: BatchSampler) -> None:
        self.sampler = sampler

    def after(self, step: int) -> Iterable[Share]:
        """The shares of the rest of the epoch that this step is in, or of the next where it is an epoch's last."""
        epoch, done = divmod(step, self.sampler.steps_per_epoch)
        return self.sampler.epoch(epoch + 1, done)

    def waited_s(self, since: float) -> float:
        return 0.0


class LeasedShares:
    """The shares that the servers lease to this worker, each when it is ready for one.

    Args:
        steps: how many global batches there are in all, or None where time decides.

    Attributes:
        reached: the last step of which all workers have trained all shares, when `after` has come to its end.
    """

    leased = True

    def __init__(self, sampler: BatchSampler, sync: PushPull, steps: int | None) -> None:
        self.sampler, self.sync, self.steps = sampler, sync, steps
        self.reached = 0
        self._answered_at = 0.0

    def open(self, state: dict[str, Any]) -> None:
        """Before `after`, by the worker that leads: whoever joins before all are through these shares finds this."""
        self.sync.open_for_joining(state)

    def after(self, step: int) -> Iterator[Share]:
        """As in StaticShares, for all workers together; it ends when all of these shares have been trained."""
        per_epoch, workers = self.sampler.steps_per_epoch, self.sampler.workers
        last = (step // per_epoch + 1) * per_epoch
        if self.steps is not None:
            last = min(last, self.steps)
        self.sync.begin_shares(step * workers, last * workers)
        while True:
            number, after = self.sync.next_share()
            self._answered_at = time.perf_counter()
            if number is None:
                self.reached = after // workers
                return
            yield self.sampler.share(number)

    def waited_s(self, since: float) -> float:
        """How long after that moment of time.perf_counter the share came that is trained on now. The thread that waits
        for shares is not the one that trains: it may have had this one long before.
        """
        return max(0.0, self._answered_at - since)
