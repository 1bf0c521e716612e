"""Parameter server, stale-synchronous: as ps-async, but a worker more than --staleness steps ahead waits.

Every answer carries the weights as they are then (eager pulls), and only how far workers drift apart is bounded: the
bounded delay of Li et al. (OSDI 2014). Ho et al.'s SSP (NIPS 2013) lets a worker read a cache of its own for as long as
that is within the bound, which saves less waiting than it costs in samples: ps/README.md has figures.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.ps.bucket import Decision, GoesOn, Policy, Step
from hvdtrain.ps.serve import serve as serve_with
from hvdtrain.ps.worker import PushPull
from hvdtrain.wire.messages import Push

FAMILY = "servers"
ORDER = 5
COLOUR = "#49672a"
MARKER = "v"
LOCKSTEP = False
SURVIVES_LOST_WORKER = True
WAIT_FOR = ("layer", "step")
OPTIONS = (
    "local_steps", "outer", "outer_lr", "outer_momentum",
    "push_scale", "look_ahead", "staleness", "delay_compensation", "staleness_lr", "wire", "bucket_mb", "record",
)  # fmt: skip
COMPRESSIONS = ("any",)
SHARES = ("leased", "equal")


class StaleSynchronous(Policy):
    """Applies pushes when they come, and lets their workers go on unless they are too far ahead.

    A worker's clock is the steps it has pushed. It waits while it is more than `staleness` ahead of the slowest
    worker's (Ho et al., NIPS 2013, section 2); without a limit nobody waits (Downpour SGD, Dean et al., 2012).

    With --push-scale softsync, workers go on at once, and as many pushes as there are workers, whoever made them, are
    averaged to one step: 1-softsync (Zhang et al., 2016, arXiv:1511.05950). The optimizer then sees what it sees in
    ps-sync, the noise of a global batch, and its moments reach equally far back in samples. Applied one by one
    (`mean`), N pushes with 1/N of the learning rate are as long as that for plain SGD; but Adam divides by the root of
    the second moment of one worker's gradients, which have N times the variance, and moves up to √N less.

    A gradient then is of weights one step behind those that it changes. So workers are sent the weights as one more
    step like the last would make them: weight prediction, as in SpecTrain (Chen et al., 2018, arXiv:1809.02839) and
    DANA (Hakimi et al., 2019, arXiv:1907.11612), which follow the momentum alone.

    Args:
        workers: how many push.
        config: push_scale: `softsync` as above; with `mean` a push is a step with 1/workers of the learning rate, with
            `none` it is a whole one. delay_compensation: see ps.bucket.Shard.compensate. staleness_lr: the learning
            rate is divided by the staleness (Zhang et al.). look_ahead: in steps; for softsync alone, without delay
            compensation, which is another remedy for the same.
        staleness: how many steps a worker may be ahead; None: any number.
    """

    def __init__(self, workers: int, config: RunConfig, staleness: int | None) -> None:
        self.clocks = dict.fromkeys(range(workers), 0)
        self.pushes_per_step = workers if config.taken_push_scale == "softsync" else 1
        self.look_ahead = config.taken_look_ahead(workers, staleness)
        self.scale = 1 / workers if config.taken_push_scale == "mean" else 1.0
        self.compensation, self.divides = config.delay_compensation, config.staleness_lr
        self.staleness = staleness
        self.summed: list[Push] = []  # the pushes in the sum
        self.lr = 0.0  # of the last of them
        self.idle_after: dict[int, int] = {}  # worker -> the step after which it pushes nothing for now
        self.at_barrier: set[int] = set()  # of these, those that push again when all workers are there
        self.waiting: list[tuple[int, GoesOn]] = []  # the steps of pushes whose workers wait

    def begin(self, step: int) -> None:
        self.clocks = dict.fromkeys(self.clocks, step)

    def accept(self, push: Push, gradient: torch.Tensor | None, version: int) -> Decision:
        staleness, steps = version - push.version_read, []
        if gradient is not None:
            self.lr = push.lr * self.scale / (max(1, staleness) if self.divides else 1)
            if self.sum is not None:
                self.sum.add_(gradient)
            else:  # the worker goes on, and its gradient's memory is its own again
                self.sum = gradient if self.pushes_per_step == 1 else gradient.clone()
            self.summed.append(push)
            if len(self.summed) == self.pushes_per_step:
                steps = self._steps()
        self.clocks[push.worker] = push.step
        released = GoesOn(push.worker, staleness)
        if self.staleness is None and not self.idle_after:  # nobody waits
            return Decision(steps, [released])
        self.waiting.append((push.step, released))
        return self._let_go(steps)

    def _steps(self) -> list[Step]:
        """With what is summed, if there is anything: as long as its share of a whole step, where workers came to an end
        first.
        """
        gradient, summed, self.sum, self.summed = self.sum, self.summed, None, []
        if gradient is None:
            return []
        if len(summed) > 1:
            gradient.div_(len(summed))
        return [Step(gradient, self.lr * (len(summed) / self.pushes_per_step), summed, self.look_ahead)]

    def flush(self) -> Decision:
        return Decision(self._steps())

    def idle(self, worker: int, step: int, at_barrier: bool) -> Decision:
        self.idle_after[worker] = step
        if at_barrier:
            self.at_barrier.add(worker)
        return self._let_go()

    def join(self, worker: int, step: int) -> None:
        self.clocks[worker] = step

    def lose(self, worker: int) -> Decision:
        self.clocks.pop(worker, None)  # it may not have got as far as to join here
        self.idle_after.pop(worker, None)
        self.at_barrier.discard(worker)
        self.waiting = [(step, waits) for step, waits in self.waiting if waits.worker != worker]
        return self._let_go()

    def waits(self, worker: int) -> bool:
        return any(waits.worker == worker for _, waits in self.waiting)

    def _let_go(self, steps: Sequence[Step] = ()) -> Decision:
        """After these steps, workers go on that are no more than `staleness` ahead of the slowest that is not idle."""
        idle = {worker for worker, step in self.idle_after.items() if self.clocks[worker] == step}
        busy = self.clocks.keys() - idle
        if not busy:  # nobody pushes what it lacks before the weights are evaluated or saved
            steps = [*steps, *self._steps()]
            if self.clocks.keys() <= self.at_barrier:  # they go on together, and wait for each other again
                self.idle_after, self.at_barrier = {}, set()
        slowest = min((self.clocks[worker] for worker in busy), default=math.inf)
        limit = math.inf if self.staleness is None else slowest + self.staleness
        free = [waits for step, waits in self.waiting if step <= limit]
        self.waiting = [(step, waits) for step, waits in self.waiting if step > limit]
        return Decision(steps, free)


def make_policy(workers: int, config: RunConfig) -> StaleSynchronous:
    """The server's policy as the job's configuration has it."""
    return StaleSynchronous(workers, config, config.staleness)


connect = PushPull
serve = partial(serve_with, make_policy=make_policy, lets_join=True)
