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
OPTIONS = ("bucket_mb", "record")
COMPRESSIONS = ("any",)


class Synchronous:
    """Holds a step's pushes until every worker's is there.

    Args:
        workers: how many pushes make a step.
    """

    def __init__(self, workers: int, config: RunConfig) -> None:
        self.workers = workers
        self.held: dict[int, Push] = {}

    def begin(self, step: int) -> None:
        """Nothing: a step is over when all have pushed it, whatever its number."""

    def accept(self, bucket: Bucket, push: Push) -> list[Reply]:
        self.held[push.worker] = push
        if len(self.held) < self.workers:
            return []
        pushes = [self.held[worker] for worker in sorted(self.held)]  # in one order: the same sum every time
        self.held = {}
        staleness = [bucket.version - push.version_read for push in pushes]
        bucket.apply(self._mean([push.gradient for push in pushes]), pushes[0].lr, *pushes)
        return [bucket.reply(own, stale) for own, stale in zip(pushes, staleness, strict=True)]

    def _mean(self, gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
        """In the memory of the first; none where one overflowed, as the all-reduced sum would."""
        finite = [gradient for gradient in gradients if gradient is not None]
        if len(finite) < len(gradients):
            return None
        mean = finite[0]
        for other in finite[1:]:
            mean.add_(other)
        return mean.div_(self.workers)

    def idle(self, bucket: Bucket, worker: int, step: int) -> list[Reply]:
        return []  # all workers are at the same step

    def pulled(self, bucket: Bucket, worker: int) -> None:
        """Nothing: no gradient is compensated for."""

    def lose(self, bucket: Bucket, worker: int) -> list[Reply]:
        raise Failure("every step of ps-sync needs a push from every worker")


connect = PushPull
make_policy = Synchronous
serve = partial(serve_with, make_policy=make_policy)
