"""Parameter server, bulk-synchronous: each shard waits for every worker's push, averages, updates once."""

from functools import partial

import torch

from hvdtrain.config import RunConfig
from hvdtrain.errors import Failure
from hvdtrain.ps import client
from hvdtrain.ps.server import Bucket, Push


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

    def accept(self, bucket: Bucket, push: Push) -> None:
        self.held[push.worker] = push
        if len(self.held) < self.workers:
            return
        pushes = [self.held[worker] for worker in sorted(self.held)]  # in one order: the same sum every time
        self.held = {}
        staleness = [bucket.version - push.version_read for push in pushes]
        bucket.apply(self._mean([push.gradient for push in pushes]), pushes[0].lr, *pushes)
        for own, stale in zip(pushes, staleness, strict=True):
            bucket.reply(own, stale)

    def _mean(self, gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
        """In the memory of the first; none where one overflowed, as the all-reduced sum would."""
        finite = [gradient for gradient in gradients if gradient is not None]
        if len(finite) < len(gradients):
            return None
        mean = finite[0]
        for other in finite[1:]:
            mean.add_(other)
        return mean.div_(self.workers)

    def rest(self, bucket: Bucket, worker: int, step: int) -> None:
        """Nothing: all workers are at the same step."""

    def gave(self, bucket: Bucket, worker: int) -> None:
        """Nothing: no gradient is compensated for."""

    def lose(self, bucket: Bucket, worker: int) -> None:
        raise Failure("every step of ps-sync needs a push from every worker")


connect = partial(client.connect, lockstep=True)
policy = Synchronous
serve = partial(client.serve, make_policy=policy)
