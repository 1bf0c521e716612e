"""Parameter server, stale-synchronous: as ps-async, but a worker more than --staleness steps ahead waits."""

import math
from functools import partial

import torch

from hvdtrain.config import RunConfig
from hvdtrain.ps import client
from hvdtrain.ps.server import Bucket, Push


class StaleSynchronous:
    """Applies each push when it comes, and lets its worker go on unless it is too far ahead.

    A worker's clock is the steps it has pushed. It waits while it is more than `staleness` ahead of the slowest
    worker's (Ho et al., NIPS 2013, section 2); without a limit nobody waits (Downpour SGD, Dean et al., 2012).

    Args:
        workers: how many push.
        config: push_scale: with `mean`, a push has 1/workers of the learning rate, so that as many pushes as there are
            workers move the weights as far as one averaged step, under Adam too, which a scaled gradient would not.
            delay_compensation: λ of DC-ASGD (Zheng et al., 2017, arXiv:1609.08326, eq. 10): the gradient g of weights
            that have moved by d since it was computed becomes g + λ g² d. staleness_lr: the learning rate is divided
            by the staleness (Zhang et al., 2016, arXiv:1511.05950).
        staleness: how many steps a worker may be ahead; None: any number.
    """

    def __init__(self, workers: int, config: RunConfig, staleness: int | None) -> None:
        self.clocks = dict.fromkeys(range(workers), 0)
        self.scale = 1 / workers if config.push_scale == "mean" else 1.0
        self.compensation, self.divides = config.delay_compensation, config.staleness_lr
        self.staleness = staleness
        self.rests: dict[int, int] = {}  # worker -> the step after which it pushes nothing for now
        self.waiting: list[tuple[Push, int]] = []  # with the staleness of the push
        self.held: dict[int, torch.Tensor] = {}  # worker -> the weights it works with, where they are compensated for

    def begin(self, step: int) -> None:
        self.clocks = dict.fromkeys(self.clocks, step)

    def accept(self, bucket: Bucket, push: Push) -> None:
        staleness = bucket.version - push.version_read
        if self.compensation:
            if not bucket.version:  # nothing is applied yet: all began with these
                self.held = dict.fromkeys(self.clocks, bucket.weights.clone()) | self.held
            if push.gradient is not None:
                moved = bucket.weights - self.held[push.worker]
                push.gradient.addcmul_(moved.mul_(push.gradient), push.gradient, value=self.compensation)
        lr = push.lr * self.scale / (max(1, staleness) if self.divides else 1)
        bucket.apply(push.gradient, lr, push)
        if len(self._resting()) == len(self.clocks):  # they rested together, and go on together
            self.rests = {}
        self.clocks[push.worker] = push.step
        self.waiting.append((push, staleness))
        self._let_go(bucket)

    def rest(self, bucket: Bucket, worker: int, step: int) -> None:
        self.rests[worker] = step
        self._let_go(bucket)

    def gave(self, bucket: Bucket, worker: int) -> None:
        if self.compensation:
            self.held[worker] = bucket.weights.clone()

    def lose(self, bucket: Bucket, worker: int) -> None:
        del self.clocks[worker]
        self.rests.pop(worker, None)
        self.held.pop(worker, None)
        self.waiting = [(push, stale) for push, stale in self.waiting if push.worker != worker]
        self._let_go(bucket)

    def _let_go(self, bucket: Bucket) -> None:
        waiting, self.waiting = self.waiting, []
        busy = self.clocks.keys() - self._resting()
        slowest = min((self.clocks[worker] for worker in busy), default=math.inf)
        for own, stale in waiting:
            if self.staleness is not None and own.step - slowest > self.staleness:
                self.waiting.append((own, stale))
                continue
            bucket.reply(own, stale)

    def _resting(self) -> set[int]:
        return {worker for worker, step in self.rests.items() if self.clocks[worker] == step}


def policy(workers: int, config: RunConfig) -> StaleSynchronous:
    """The server's policy as the job's configuration has it."""
    return StaleSynchronous(workers, config, config.staleness)


connect = partial(client.connect, lockstep=False)
serve = partial(client.serve, make_policy=policy)
