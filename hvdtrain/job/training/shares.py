"""The shares of global batches that a worker trains on.

In lockstep a worker has one share of each batch. Leased shares go to whichever worker is ready.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.data.sampling import BatchSampler, Share
from hvdtrain.job.coordination.synchroniser import LeasesShares, Synchroniser
from hvdtrain.job.training.barrier import GO_ON, Decision, StepBarrier
from hvdtrain.job.training.history import History

FORGETTING = 0.75  # the factor by which earlier measurements count less at each barrier


class Shares:
    """This worker's shares in lockstep: one of every global batch, as long as the others'.

    A share is made when it is needed, since an epoch of a million samples has many. A round of
    shares ends with the epoch, or when the workers decide something.

    Args:
        sampler: the order of training.
        drops: whether pushes may come too late and be dropped. Nobody knows then how many samples
            have been trained on.

    Attributes:
        leased: whether servers lease the shares.
        last_part: the part of training time that the end of a round counts as.
    """

    leased = False
    last_part = "data"  # waiting for what reads ahead to end

    def __init__(self, sampler: BatchSampler, drops: bool = False) -> None:
        self.sampler = sampler
        self.drops = drops

    def after(self, step: int) -> Iterator[Share]:
        """Yields the shares of the steps after this one, to the end of the epoch.

        After the last step of an epoch they are of the next epoch.
        """
        per_epoch = self.sampler.steps_per_epoch
        workers = self.sampler.workers
        epoch_end = (step // per_epoch + 1) * per_epoch
        for done in range(step, epoch_end):
            number = done * workers + self.sampler.worker
            yield self.sampler.share(number, self.speeds(done))

    def speeds(self, done: int) -> Sequence[float]:
        """Returns each worker's speed, in proportion to which a batch is cut.

        Empty where all shares are as long.

        Args:
            done: the number of steps before the batch.
        """
        return ()

    def recut(self, worker: int, workers: int) -> None:
        """Cuts every batch from the next step on for another number of workers.

        Args:
            worker: this worker's place among them, from 0.
            workers: the number of workers.
        """
        self.sampler = dataclasses.replace(self.sampler, worker=worker, workers=workers)

    def waited_s(self, since: float) -> float:
        """Returns how long this worker has waited for a lease: see LeasedShares."""
        return 0.0

    def took(self, samples: int, seconds: float) -> None:
        """Takes note of the seconds in which this worker computed the gradients of samples."""

    def after_step(self, barrier: StepBarrier, step: int, elapsed: float) -> Decision:
        """Returns what the workers do after this step.

        Args:
            barrier: brings the workers together.
            step: the step.
            elapsed: seconds of training so far.
        """
        return barrier.after(step, elapsed, step % self.sampler.steps_per_epoch == 0)

    def after_round(
        self, barrier: StepBarrier, history: History, decision: Decision, elapsed: float
    ) -> Decision:
        """Returns what the workers do after a round of shares.

        Args:
            barrier: brings the workers together.
            history: the results of training, whose step is the last one taken.
            decision: the decision that ended the round.
            elapsed: seconds of training so far.
        """
        return decision

    def trained(self, history: History) -> int | None:
        """Returns how many samples were trained on since the last evaluation.

        Samples of workers that were lost since count too. None with `drops`, where nobody knows.
        """
        if self.drops:
            return None
        before = history.last["step"] if history.last else 0
        return self.sampler.trained(history.step) - self.sampler.trained(before)


class MeasuredShares(Shares):
    """Shares of every global batch that are as long as each worker is fast, to take the same time.

    Batches are cut anew after each barrier, by the workers' measured speeds. Earlier measurements
    count less at each barrier.

    Args:
        sampler: the order of training.
        lag: the number of steps from a barrier to the first step that is cut by its speeds. Shares
            of the steps before may have been read ahead.

    Attributes:
        computed: samples whose gradients this worker has computed, and the seconds of that: [2]
            float64.
    """

    def __init__(self, sampler: BatchSampler, lag: int) -> None:
        super().__init__(sampler)
        self.lag = lag
        self.computed = torch.zeros(2, dtype=torch.float64)
        self._begin()

    def _begin(self) -> None:
        # `computed` of all workers at the last barrier, [workers, 2].
        self._before = torch.zeros(self.sampler.workers, 2, dtype=torch.float64)
        self._recent = torch.zeros_like(self._before)
        # The first step of each cut, and the workers' speeds.
        self._cuts: list[tuple[int, list[float]]] = [(0, [])]

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
            gathered_at, computed = barrier.gathered
            barrier.gathered = None
            # The numbers differ if a worker was lost meanwhile, until recut.
            if len(computed) == self.sampler.workers:
                self._add_cut(gathered_at, computed)
        return decision

    def _add_cut(self, gathered_at: int, computed: torch.Tensor) -> None:
        """Cuts later batches by new measurements.

        Args:
            gathered_at: the step of the barrier.
            computed: of all workers, [workers, 2].
        """
        self._recent = FORGETTING * self._recent + computed - self._before
        self._before = computed
        samples, seconds = self._recent.T
        if samples.min() > 0:
            speeds = (samples / seconds).tolist()
            # Kept are the cut in effect, and as many later ones as a barrier at each step may add
            # before the last takes effect.
            kept = self._cuts[-1 - self.lag :]
            self._cuts = [*kept, (gathered_at + self.lag, speeds)]


class LeasedShares(Shares):
    """The shares that servers lease to this worker, one whenever it is ready.

    A round of shares ends when the workers together have trained on all shares of the epoch, or
    when a worker wants a decision.

    Args:
        sampler: the order of training.
        sync: leases the shares.
        steps: the number of global batches of the job; None where time decides.
        first: the step of the snapshot that the job goes on from, or 0.
        every: H with --local-steps H, else 1. A worker leases its shares of so many steps at once.
            They are in one push, and count together or not at all.

    Attributes:
        reached: the last step whose shares have all been trained on, once `after` has ended.
    """

    leased = True
    last_part = "barrier"  # waiting for the last worker's last share

    def __init__(
        self, sampler: BatchSampler, sync: LeasesShares, steps: int | None, first: int, every: int
    ) -> None:
        super().__init__(sampler)
        self.sync = sync
        self.steps = steps
        self.first = first
        self.every = every
        self.reached = 0
        self._answered_at = 0.0

    def open(self, state: Callable[[], dict[str, Any]]) -> None:
        """Lets workers join during the next round of shares. The worker that leads calls this.

        Args:
            state: returns the state that workers find who join.
        """
        sizes = {  # the arguments of samples_of_share
            "samples": self.sampler.samples,
            "batch_size": self.sampler.batch_size,
            "every": self.every,
            "after": self.first,
            "until": self.steps,
        }
        self.sync.open_for_joining(state() | {"sizes": sizes})

    def after(self, step: int) -> Iterator[Share]:
        """Yields shares of the steps after this one until all shares of the epoch are trained on.

        All workers call this together.
        """
        sampler = self.sampler
        every = self.every
        per_epoch = sampler.steps_per_epoch
        workers = sampler.workers
        last = (step // per_epoch + 1) * per_epoch
        if self.steps is not None:
            last = min(last, self.steps)
        first_round = sampler.round_of(step, every)
        last_round = sampler.round_of(last - 1, every)
        self.sync.begin_shares(first_round * workers, (last_round + 1) * workers)
        while True:
            number, first_not_leased = self.sync.next_share()
            self._answered_at = time.perf_counter()
            if number is None:
                first_open_round = first_not_leased // workers
                self.reached = min(sampler.steps_before(first_open_round, every), last)
                return
            number_of_round, slot = divmod(number, workers)
            steps_of_round = sampler.steps_of_round(number_of_round, every, last)
            steps_left = [done for done in steps_of_round if done >= step]
            self.sync.take_share(number, len(steps_left))
            for done in steps_left:
                yield sampler.share(done * workers + slot)

    def waited_s(self, since: float) -> float:
        """Returns how long after a moment the share came that is trained on now; 0 if before it.

        A thread that reads ahead waits for shares. It may have had the share long before.

        Args:
            since: when this worker was ready for the share, by time.perf_counter.
        """
        return max(0.0, self._answered_at - since)

    def after_step(self, barrier: StepBarrier, step: int, elapsed: float) -> Decision:
        """Ends the round of leases early if this worker wants a decision; returns GO_ON."""
        if barrier.ends_round(elapsed):
            self.sync.pause_leases()
        return GO_ON

    def after_round(
        self, barrier: StepBarrier, history: History, decision: Decision, elapsed: float
    ) -> Decision:
        """Returns what the workers do after a round, with the round's last step in the history."""
        history.step = self.reached
        return barrier.after_round(history.step, elapsed)


def make_shares(
    config: RunConfig,
    sampler: BatchSampler,
    sync: Synchroniser,
    steps: int | None,
    first: int,
    ahead: int,
) -> Shares:
    """Returns the shares that this worker trains on.

    Args:
        config: the configuration of the run.
        sampler: the order of training.
        sync: connects this worker to the others.
        steps: the number of steps of the job; None where time decides.
        first: the step of the snapshot that the job goes on from, or 0.
        ahead: how many shares may be read before they are trained on.
    """
    if not modes.declared(config.mode).lockstep:
        assert isinstance(sync, LeasesShares)
        return LeasedShares(sampler, sync, steps, first, config.local_steps or 1)
    # The lag is longer than `ahead`: a cut is known one step after its barrier, and then the next
    # share has been taken to be read.
    if config.shares == "measured":
        return MeasuredShares(sampler, ahead + 3)
    return Shares(sampler, drops=bool(config.backup))
