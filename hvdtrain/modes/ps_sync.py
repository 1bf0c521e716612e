"""Parameter server, bulk-synchronous: each shard waits for every worker's push, averages, updates once."""

from functools import partial

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import Failure
from hvdtrain.ps.bucket import Bucket, Reply
from hvdtrain.ps.messages import Push
from hvdtrain.ps.serve import serve as serve_with
from hvdtrain.ps.worker import PushPull

HAS_SERVERS = True
LOCKSTEP = True
SURVIVES_LOST_WORKER = False
OPTIONS = ("backup", "wire", "bucket_mb", "record")
COMPRESSIONS = ("any",)


class Synchronous:
    """Adds a step's pushes up as they come, and updates once when there are enough.

    All workers' make a step, added in the order of workers, so that the sum repeats to the bit: a push that comes
    before its predecessors is held until they have come. Workers bound what is held: see exchange.UNDER_WAY.

    With --backup B the first N - B to come make a step, those that come later are dropped, and their workers go on with
    the new weights (Chen et al., 2016, arXiv:1604.00981, section 3). The sum is in the order of arrival then, which the
    ledger has.

    Args:
        workers: how many push.
    """

    def __init__(self, workers: int, config: RunConfig) -> None:
        self.needed, self.in_order = workers - config.backup, not config.backup
        self.step = 0  # the last that is over
        self.sum: torch.Tensor | None = None
        self.added: list[Push] = []  # without their gradients
        self.early: dict[int, Push] = {}  # worker -> its push, which waits for its predecessors'

    def begin(self, step: int) -> None:
        self.step = step

    def accept(self, bucket: Bucket, push: Push) -> list[Reply]:
        if not self.in_order:
            if push.step <= self.step:
                bucket.drop(push)
                return [bucket.reply(push, bucket.version - push.version_read, dropped=self.step)]
            self._add(push)
        else:
            self.early[push.worker] = push
            while (following := self.early.pop(len(self.added), None)) is not None:
                self._add(following)
        return self._update(bucket) if len(self.added) == self.needed else []

    def _add(self, push: Push) -> None:
        self.sum = push.gradient if self.sum is None else self.sum.add_(push.gradient)
        self.added.append(push.with_gradient(None))

    def _update(self, bucket: Bucket) -> list[Reply]:
        assert self.sum is not None
        pushes, mean = self.added, self.sum.div_(self.needed)
        self.added, self.sum = [], None
        self.step = pushes[0].step
        staleness = [bucket.version - push.version_read for push in pushes]
        bucket.apply(mean, pushes[0].lr, *pushes)
        return [bucket.reply(own, stale) for own, stale in zip(pushes, staleness, strict=True)]

    def flush(self, bucket: Bucket) -> None:
        """Nothing: a step has all its pushes."""

    def idle(self, bucket: Bucket, worker: int, step: int, at_barrier: bool) -> list[Reply]:
        return []  # all workers are at the same step

    def pulled(self, bucket: Bucket, worker: int) -> None:
        """Nothing: no gradient is compensated for."""

    def join(self, bucket: Bucket, worker: int, step: int) -> None:
        raise Failure("ps-sync has as many workers as it began with")

    def lose(self, bucket: Bucket, worker: int) -> list[Reply]:
        raise Failure("every step of ps-sync needs a push from every worker")


connect = PushPull
make_policy = Synchronous
serve = partial(serve_with, make_policy=make_policy)
