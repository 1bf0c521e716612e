"""Parameter server, stale-synchronous: as ps-async, but a worker more than --staleness steps ahead waits."""

import math
from functools import partial

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.ps.bucket import Bucket, Reply
from hvdtrain.ps.messages import Push
from hvdtrain.ps.serve import serve as serve_with
from hvdtrain.ps.worker import PushPull

HAS_SERVERS = True
LOCKSTEP = False
SURVIVES_LOST_WORKER = True
OPTIONS = ("push_scale", "staleness", "delay_compensation", "staleness_lr", "bucket_mb", "record")
COMPRESSIONS = ("any",)
SHARES = ("leased", "static")


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
        self.idle_after: dict[int, int] = {}  # worker -> the step after which it pushes nothing for now
        self.waiting: list[tuple[Push, int]] = []  # pushes whose workers wait, with the staleness of each
        self.weights_of: dict[int, torch.Tensor] = {}  # worker -> the weights it works with, for delay compensation

    def begin(self, step: int) -> None:
        self.clocks = dict.fromkeys(self.clocks, step)

    def accept(self, bucket: Bucket, push: Push) -> list[Reply]:
        staleness = bucket.version - push.version_read
        if self.compensation:
            if not bucket.version:  # nothing is applied yet: all began with these
                self.weights_of = dict.fromkeys(self.clocks, bucket.weights.clone()) | self.weights_of
            if push.gradient is not None:
                moved = bucket.weights - self.weights_of[push.worker]
                push.gradient.addcmul_(moved.mul_(push.gradient), push.gradient, value=self.compensation)
        lr = push.lr * self.scale / (max(1, staleness) if self.divides else 1)
        bucket.apply(push.gradient, lr, push)
        if len(self._idle()) == len(self.clocks):  # they were idle together, and go on together
            self.idle_after = {}
        self.clocks[push.worker] = push.step
        self.waiting.append((push, staleness))
        return self._let_go(bucket)

    def idle(self, bucket: Bucket, worker: int, step: int) -> list[Reply]:
        self.idle_after[worker] = step
        return self._let_go(bucket)

    def pulled(self, bucket: Bucket, worker: int) -> None:
        if self.compensation:
            self.weights_of[worker] = bucket.weights.clone()

    def lose(self, bucket: Bucket, worker: int) -> list[Reply]:
        del self.clocks[worker]
        self.idle_after.pop(worker, None)
        self.weights_of.pop(worker, None)
        self.waiting = [(push, stale) for push, stale in self.waiting if push.worker != worker]
        return self._let_go(bucket)

    def _let_go(self, bucket: Bucket) -> list[Reply]:
        """The replies to workers that are no more than `staleness` ahead of the slowest that is not idle."""
        busy = self.clocks.keys() - self._idle()
        slowest = min((self.clocks[worker] for worker in busy), default=math.inf)
        limit = math.inf if self.staleness is None else slowest + self.staleness
        free = [(push, stale) for push, stale in self.waiting if push.step <= limit]
        self.waiting = [(push, stale) for push, stale in self.waiting if push.step > limit]
        return [bucket.reply(push, stale) for push, stale in free]

    def _idle(self) -> set[int]:
        return {worker for worker, step in self.idle_after.items() if self.clocks[worker] == step}


def make_policy(workers: int, config: RunConfig) -> StaleSynchronous:
    """The server's policy as the job's configuration has it."""
    return StaleSynchronous(workers, config, config.staleness)


connect = PushPull
serve = partial(serve_with, make_policy=make_policy)
