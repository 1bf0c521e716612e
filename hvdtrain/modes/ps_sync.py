"""Parameter server, bulk-synchronous: each shard waits for every worker's push, averages, updates once."""

from functools import partial

from hvdtrain.ps import client
from hvdtrain.ps.server import Push, Shard


class Synchronous:
    """Holds a step's pushes until every worker's is there.

    Args:
        workers: how many pushes make a step.
        scale: unused here: the average is taken whatever the scale of asynchronous pushes.
    """

    def __init__(self, workers: int, scale: float) -> None:
        self.workers = workers
        self.waiting: dict[int, list[Push]] = {}  # worker -> its push, and what was re-sent of it

    def accept(self, shard: Shard, push: Push) -> None:
        self.waiting[push.worker] = [push]
        if len(self.waiting) < self.workers:
            return
        pushes = [self.waiting[worker][0] for worker in sorted(self.waiting)]  # in one order: the same sum every time
        mean = pushes[0].gradient
        for other in pushes[1:]:
            mean = mean.add_(other.gradient)
        staleness = [shard.version - push.version_read for push in pushes]
        shard.apply(mean.div_(self.workers), push.lr)
        for stale, worker in zip(staleness, sorted(self.waiting), strict=True):
            for waiting in self.waiting[worker]:
                waiting.answer.set_result(shard.snapshot(stale))
        self.waiting = {}

    def join(self, push: Push) -> bool:
        waiting = self.waiting.get(push.worker, [])
        if not waiting or waiting[0].step != push.step:
            return False
        waiting.append(push)
        return True


connect = partial(client.connect, lockstep=True)
serve = partial(client.serve, policy=Synchronous)
