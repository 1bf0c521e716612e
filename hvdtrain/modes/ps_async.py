"""Parameter server, asynchronous: each push is applied at once, in the order of arrival; staleness is unbounded."""

from functools import partial

from hvdtrain.ps import client
from hvdtrain.ps.server import Push, Shard


class Asynchronous:
    """Applies each push when it comes (Downpour SGD, Dean et al. 2012; MXNet's dist_async).

    Args:
        workers: how many push.
        scale: what the learning rate of one push is multiplied by. With 1/workers, as many pushes as there are
            workers move the weights as far as one averaged step, under Adam too, which a scaled gradient would not.
    """

    def __init__(self, workers: int, scale: float) -> None:
        self.scale = scale

    def accept(self, shard: Shard, push: Push) -> None:
        staleness = shard.version - push.version_read
        shard.apply(push.gradient, push.lr * self.scale)
        push.answer.set_result(shard.snapshot(staleness))

    def join(self, push: Push) -> bool:
        return False


connect = partial(client.connect, lockstep=False)
serve = partial(client.serve, policy=Asynchronous)
