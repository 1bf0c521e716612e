"""Which shares of an epoch a worker trains on: always that of its number, or whichever is next when it is ready."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from hvdtrain import modes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.synchroniser import Synchroniser
from hvdtrain.data.sampling import BatchSampler, Share
from hvdtrain.ps.worker import PushPull
from hvdtrain.training.barrier import GO_ON, Decision, StepBarrier
from hvdtrain.training.history import History

FORGETTING = 0.75  # what counts of what was measured, at each barrier after it


class Shares:
    """This worker's share of every global batch, as long as the others'. Each is made when it is asked for: an epoch of
    a million samples has many. A round of them is the rest of an epoch, or ends where all workers decide something.

    Args:
        drops: pushes may come too late, and nobody knows whether a share has been trained.

    Attributes:
        leased: whether shares are.
        last_part: of a step's time, what a round's end counts as.
    """

    leased = False
    last_part = "data"  # the end of what reads ahead

    def __init__(self, sampler: BatchSampler, drops: bool = False) -> None:
        self.sampler, self.drops = sampler, drops

    def after(self, step: int) -> Iterator[Share]:
        """The shares of the rest of the epoch that this step is in, or of the next where it is an epoch's last."""
        per_epoch, workers = self.sampler.steps_per_epoch, self.sampler.workers
        for done in range(step, (step // per_epoch + 1) * per_epoch):
            yield self.sampler.share(done * workers + self.sampler.worker, self.speeds(done))

    def speeds(self, done: int) -> Sequence[float]:
        """Of each worker, by which the step's batch is shared out that comes after so many; none: all are equal."""
        return ()

    def recut(self, worker: int, workers: int) -> None:
        """From the next step on so many workers share every batch; this one's place is `worker`."""
        self.sampler = dataclasses.replace(self.sampler, worker=worker, workers=workers)

    def waited_s(self, since: float) -> float:
        return 0.0

    def took(self, samples: int, seconds: float) -> None:
        """This worker has computed the gradients of so many samples in so many seconds."""

    def after_step(self, barrier: StepBarrier, step: int, elapsed: float) -> Decision:
        return barrier.after(step, elapsed, step % self.sampler.steps_per_epoch == 0)

    def after_round(self, barrier: StepBarrier, history: History, decision: Decision, elapsed: float) -> Decision:
        return decision

    def trained(self, history: History) -> int | None:
        """Samples that were trained since the last evaluation, by workers that are lost now too; None: see `drops`."""
        if self.drops:
            return None
        before = history.last["step"] if history.last else 0
        return self.sampler.trained(history.step) - self.sampler.trained(before)


class MeasuredShares(Shares):
    """Shares of every global batch in proportion to how fast each worker computes: all take as long. They are cut anew
    after each of the workers' barriers, by what each has computed of late: what was before counts less each time.

    Args:
        lag: how many steps after a barrier a cut takes effect: no shares of these have been read ahead.
    """

    def __init__(self, sampler: BatchSampler, lag: int) -> None:
        super().__init__(sampler)
        self.lag = lag
        self.computed = torch.zeros(2, dtype=torch.float64)  # samples and seconds so far, of this worker
        self._begin()

    def _begin(self) -> None:
        self._before = torch.zeros(self.sampler.workers, 2, dtype=torch.float64)  # of all, at the barrier before
        self._recent = torch.zeros_like(self._before)
        self._cuts: list[tuple[int, list[float]]] = [(0, [])]  # from which step on, and speeds

    def recut(self, worker: int, workers: int) -> None:
        super().recut(worker, workers)
        self._begin()

    def speeds(self, done: int) -> Sequence[float]:
        return next(speeds for first, speeds in reversed(self._cuts) if first <= done)

    def took(self, samples: int, seconds: float) -> None:
        self.computed += torch.tensor([samples, seconds])

    def after_step(self, barrier: StepBarrier, step: int, elapsed: float) -> Decision:
        is_last = step % self.sampler.steps_per_epoch == 0
        decision = barrier.after(step, elapsed, is_last, self.computed.tolist())
        if barrier.gathered:
            at, computed = barrier.gathered
            barrier.gathered = None
            if len(computed) != self.sampler.workers:  # one of them is lost: see recut
                return decision
            self._recent = FORGETTING * self._recent + computed - self._before
            self._before = computed
            samples, seconds = self._recent.T
            if samples.min() > 0:
                self._cuts = [*self._cuts[-1 - self.lag :], (at + self.lag, (samples / seconds).tolist())]
        return decision


class LeasedShares(Shares):
    """The shares that the servers lease to this worker, each when it is ready for one. A round of them ends when those
    of the epoch have been trained, by whomever, or a worker wants a decision.

    Args:
        steps: how many global batches there are in all, or None where time decides.
        every: with --local-steps H, else 1. A worker leases its shares of a round of so many steps at once: all of them
            are in one push, and count together or not at all.

    Attributes:
        reached: the last step of which all workers have trained all shares, when `after` has come to its end.
    """

    leased = True
    last_part = "barrier"  # from this worker's last share to the last of all

    def __init__(self, sampler: BatchSampler, sync: PushPull, steps: int | None, every: int) -> None:
        super().__init__(sampler)
        self.sync, self.steps, self.every = sync, steps, every
        self.reached = 0
        self._answered_at = 0.0

    def open(self, state: Callable[[], dict[str, Any]]) -> None:
        """Before `after`, by the worker that leads: whoever joins before all are through these shares finds this."""
        self.sync.open_for_joining(state())

    def after(self, step: int) -> Iterator[Share]:
        """As in Shares, for all workers together; it ends when all of these shares have been trained."""
        sampler, every = self.sampler, self.every
        per_epoch, workers = sampler.steps_per_epoch, sampler.workers
        last = (step // per_epoch + 1) * per_epoch
        if self.steps is not None:
            last = min(last, self.steps)
        self.sync.begin_shares(
            sampler.round_of(step, every) * workers, (sampler.round_of(last - 1, every) + 1) * workers
        )
        while True:
            number, after = self.sync.next_share()
            self._answered_at = time.perf_counter()
            if number is None:
                self.reached = min(sampler.steps_before(after // workers, every), last)
                return
            number_of_round, slot = divmod(number, workers)
            done = [k for k in sampler.steps_of_round(number_of_round, every, last) if k >= step]
            self.sync.take_share(number, len(done))
            for k in done:
                yield sampler.share(k * workers + slot)

    def waited_s(self, since: float) -> float:
        """How long after that moment of time.perf_counter the share came that is trained on now. The thread that waits
        for shares is not the one that trains: it may have had this one long before.
        """
        return max(0.0, self._answered_at - since)

    def after_step(self, barrier: StepBarrier, step: int, elapsed: float) -> Decision:
        """What to do after a step: nothing but to ask for the round's end, where this worker wants a decision."""
        barrier.in_round(elapsed)
        return GO_ON

    def after_round(self, barrier: StepBarrier, history: History, decision: Decision, elapsed: float) -> Decision:
        """What all workers do after the round, which has come to the step that the history then has."""
        history.step = self.reached
        return barrier.after_round(history.step, elapsed)


def make_shares(config: RunConfig, sampler: BatchSampler, sync: Synchroniser, steps: int | None, ahead: int) -> Shares:
    """
    Args:
        ahead: how many shares may be read before they are trained on.
    """
    if not modes.declared(config.mode).lockstep:
        return LeasedShares(sampler, cast(PushPull, sync), steps, config.local_steps or 1)
    # A cut is known a step after its barrier, and the share that is read next is not trained on yet.
    if config.shares == "measured":
        return MeasuredShares(sampler, ahead + 3)
    return Shares(sampler, drops=bool(config.backup))
