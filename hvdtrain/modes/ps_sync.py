"""Parameter server, bulk-synchronous: each shard waits for every worker's push, averages, updates once."""

from functools import partial

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

    def accept(self, bucket: Bucket, push: Push) -> None:
        self.held[push.worker] = push
        if len(self.held) < self.workers:
            return
        pushes = [self.held[worker] for worker in sorted(self.held)]  # in one order: the same sum every time
        self.held = {}
        mean = pushes[0].gradient
        for other in pushes[1:]:
            mean.add_(other.gradient)
        staleness = [bucket.version - push.version_read for push in pushes]
        bucket.apply(mean.div_(self.workers), pushes[0].lr, *pushes)
        for own, stale in zip(pushes, staleness, strict=True):
            bucket.reply(own, stale)

    def rest(self, bucket: Bucket, worker: int, step: int) -> None:
        """Nothing: all workers are at the same step."""

    def gave(self, bucket: Bucket, worker: int) -> None:
        """Nothing: no gradient is compensated for."""

    def lose(self, bucket: Bucket, worker: int) -> None:
        raise Failure("every step of ps-sync needs a push from every worker")


connect = partial(client.connect, lockstep=True)
policy = Synchronous
serve = partial(client.serve, make_policy=policy)
