"""Parameter server, stale-synchronous: as ps-async, but a worker more than --staleness steps ahead
waits.

Every answer has the current weights (eager pulls), and only the distance between workers is
bounded. This is the bounded delay of Li et al. (OSDI 2014). In Ho et al.'s SSP (NIPS 2013) a worker
reads its cache as long as the cache is within the bound. That saves less waiting than it costs in
samples: tests/benchmarks/README.md has figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdtrain.base.modes import LOCAL_STEPS, SERVERS, EffectiveOptions, Mode
from hvdtrain.job.ps.policy import Policy, PolicyDecision, Release, Update

if TYPE_CHECKING:
    import torch

    from hvdtrain.base.config.run_config import RunConfig
    from hvdtrain.job.coordination.job import Job
    from hvdtrain.job.coordination.joining import Arrival
    from hvdtrain.job.coordination.synchroniser import Synchroniser
    from hvdtrain.job.ps.serve import KilledServer
    from hvdtrain.job.wire.messages import Push

# The options of ps-async, all of which this mode has too.
ASYNCHRONOUS = (
    *LOCAL_STEPS,
    "push_scale",
    "look_ahead",
    "delay_compensation",
    "staleness_lr",
    "wire",
    "bucket_mb",
    "record",
)


def softsync_words(run: EffectiveOptions) -> str:
    """Returns how pushes become a step, unless each is applied alone, as in Downpour."""
    if run.push_scale != "softsync" or not run.look_ahead:
        return ""
    return (
        "as many pushes as there are workers, whoever made them, are averaged to one step; workers "
        f"get the weights as the next step will probably make them (--look-ahead {run.look_ahead:g}); "
        "--push-scale none applies each push at once, as MXNet's dist_async does"
    )


MODE = Mode(
    family=SERVERS,
    order=5,
    colour="#49672a",
    marker="v",
    lockstep=False,
    survives_lost_worker=True,
    wait_for=("layer", "step"),
    options=(*ASYNCHRONOUS, "staleness"),
    compressions=("any",),
    shares=("leased", "equal"),
    step_words=softsync_words,
)


class StaleSynchronous(Policy):
    """Applies pushes when they come, and lets their workers go on unless they are too far ahead.

    A worker's clock is the number of steps that it has pushed. A worker waits while its clock is
    more than `staleness` ahead of the slowest worker's (Ho et al., NIPS 2013, section 2). Without a
    limit nobody waits (Downpour SGD, Dean et al., 2012).

    With --push-scale softsync, as many pushes as there are workers, whichever workers made them,
    are averaged to one step, and the workers go on at once. This is 1-softsync (Zhang et al., 2016,
    arXiv:1511.05950). The optimizer then sees what it sees in ps-sync: gradients with the noise of
    a global batch. Its moments reach back equally far in samples. With `mean`, N pushes are applied
    one by one with 1/N of the learning rate. For plain SGD the N steps together are as long as the
    one. But Adam divides by the root of the second moment of one worker's gradients, which have N
    times the variance, and so moves up to √N less.

    With softsync, a gradient is of weights one step older than the weights that it changes.
    Therefore workers are sent the weights as another step like the last one would make them. This
    is weight prediction, as in SpecTrain (Chen et al., 2018, arXiv:1809.02839) and DANA (Hakimi et
    al., 2019, arXiv:1907.11612), which predict by the momentum alone.

    Args:
        workers: the number of workers.
        config: the configuration of the run. Of its options, push_scale is `softsync` as above;
            with `mean` a push is a step with 1/workers of the learning rate, with `none` a step
            with all of it. delay_compensation: see ps.bucket.BucketWeights.compensate. With
            staleness_lr the learning rate is divided by the staleness (Zhang et al.). look_ahead,
            in steps, is for softsync without delay compensation, which is another remedy for
            staleness.
        staleness: how many steps a worker may be ahead; None for any number.
    """

    def __init__(self, workers: int, config: RunConfig, staleness: int | None) -> None:
        self.clocks = dict.fromkeys(range(workers), 0)
        self.pushes_per_step = workers if config.effective_push_scale == "softsync" else 1
        self.look_ahead = config.effective_look_ahead(workers, staleness)
        self.scale = 1 / workers if config.effective_push_scale == "mean" else 1.0
        self.compensation = config.delay_compensation
        self.divides_lr = config.staleness_lr
        self.staleness = staleness
        self.summed: list[Push] = []  # the pushes in the sum
        self.lr = 0.0  # the learning rate of the last push in the sum
        # The step of each idle worker after which it pushes nothing for now.
        self.idle_after: dict[int, int] = {}
        # Idle workers that push again when all workers have come to the barrier.
        self.at_barrier: set[int] = set()
        # The workers that wait, and the steps of their pushes.
        self.waiting: list[tuple[int, Release]] = []

    def begin(self, step: int) -> None:
        self.clocks = dict.fromkeys(self.clocks, step)

    def accept(self, push: Push, gradient: torch.Tensor | None, version: int) -> PolicyDecision:
        staleness = version - push.version_read
        updates: list[Update] = []
        if gradient is not None:
            self._add(push, gradient, staleness)
            if len(self.summed) == self.pushes_per_step:
                updates = self._make_update()
        self.clocks[push.worker] = push.step
        released = Release(push.worker, staleness)
        if self.staleness is None and not self.idle_after:  # nobody waits
            return PolicyDecision(updates, [released])
        self.waiting.append((push.step, released))
        return self._let_go(updates)

    def _add(self, push: Push, gradient: torch.Tensor, staleness: int) -> None:
        """Adds a push to the sum."""
        self.lr = push.lr * self.scale
        if self.divides_lr:
            self.lr /= max(1, staleness)
        if self.sum is not None:
            self.sum.add_(gradient)
        elif self.pushes_per_step == 1:
            self.sum = gradient
        else:
            # The worker may go on before the sum is complete, and use its gradient's memory again.
            self.sum = gradient.clone()
        self.summed.append(push)

    def _make_update(self) -> list[Update]:
        """Returns an update with the mean of the summed pushes; no update if there are none.

        If workers were idle before the sum was complete, the step is shorter in proportion.
        """
        gradient = self.sum
        summed = self.summed
        self.sum = None
        self.summed = []
        if gradient is None:
            return []
        if len(summed) > 1:
            gradient.div_(len(summed))
        part_of_step = len(summed) / self.pushes_per_step
        return [Update(gradient, self.lr * part_of_step, summed, self.look_ahead)]

    def flush(self) -> PolicyDecision:
        return PolicyDecision(self._make_update())

    def idle(self, worker: int, step: int, at_barrier: bool) -> PolicyDecision:
        self.idle_after[worker] = step
        if at_barrier:
            self.at_barrier.add(worker)
        return self._let_go()

    def join(self, worker: int, step: int) -> None:
        self.clocks[worker] = step

    def lose(self, worker: int) -> PolicyDecision:
        self.clocks.pop(worker, None)  # it may have been lost before it joined here
        self.idle_after.pop(worker, None)
        self.at_barrier.discard(worker)
        self.waiting = [
            (step, release) for step, release in self.waiting if release.worker != worker
        ]
        return self._let_go()

    def waits(self, worker: int) -> bool:
        return any(release.worker == worker for _, release in self.waiting)

    def _let_go(self, updates: Sequence[Update] = ()) -> PolicyDecision:
        """Lets workers go on that are at most `staleness` steps ahead of the slowest busy worker.

        Args:
            updates: the updates to apply before.
        """
        busy_clocks = list(self.clocks.values())
        if self.idle_after:
            busy_clocks = [
                clock
                for worker, clock in self.clocks.items()
                if self.idle_after.get(worker) != clock
            ]
        if not busy_clocks:
            # Nobody completes the sum before the weights are evaluated or saved.
            updates = [*updates, *self._make_update()]
            if self.clocks.keys() <= self.at_barrier:
                # All workers have come to the barrier. They go on, and wait for each other again.
                self.idle_after = {}
                self.at_barrier = set()
        slowest = min(busy_clocks, default=math.inf)
        limit = math.inf if self.staleness is None else slowest + self.staleness
        released = [release for step, release in self.waiting if step <= limit]
        self.waiting = [(step, release) for step, release in self.waiting if step > limit]
        return PolicyDecision(updates, released)


def make_policy(workers: int, config: RunConfig) -> StaleSynchronous:
    return StaleSynchronous(workers, config, config.staleness)


def connect(job: Job, arrival: Arrival | None = None) -> Synchroniser:
    from hvdtrain.job.buckets.local_rounds import with_leased_local_steps
    from hvdtrain.job.ps.worker import PushPull

    return with_leased_local_steps(PushPull(job, arrival), job)


def serve(job: Job, report: Callable[[str], None], killed: KilledServer | None = None) -> None:
    from hvdtrain.job.ps.serve import serve as serve_buckets

    serve_buckets(job, report, make_policy, lets_join=True, killed=killed)
