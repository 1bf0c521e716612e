"""Each worker gets a shard of the averaged gradients from Horovod, updates its weights and sends them to all (ZeRO-1).

A ring that is a server beside every worker: reduce-scatter, the optimizer on each rank's shard, all-gather (Rajbhandari
et al., SC'20, arXiv:1910.02054, section 5.1). It sends what an all-reduce does, and each rank has a part of the
optimizer's state.
"""

from collections.abc import Iterator

import horovod.torch as hvd
import torch
from torch.futures import Future

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.joining import Arrival
from hvdtrain.modes._ring import Ring, RingLane
from hvdtrain.numerics.optimizers import COUNT, state_of

FAMILY = "ring"
ORDER = 3
COLOUR = "#7f00ff"
MARKER = "P"
ELASTIC = True
JOINS_HOROVOD = True
OPTIONS = ("bucket_mb", "ring_transport")
SHARES = ("equal", "measured")
WAIT_FOR = ("step", "layer")


class ShardedLane(RingLane):
    """A shard of the bucket is updated here, those before and after it on the other ranks."""

    def bounds(self, ranks: int) -> list[int]:
        """Where in the bucket the ranks' shards begin, and its end."""
        each, more = divmod(len(self.weights), ranks)  # the first ranks have one more: so Horovod cuts
        return [rank * each + min(rank, more) for rank in range(ranks + 1)]

    def choose_part(self) -> tuple[int, torch.Tensor]:
        start, stop = self.bounds(self.world.size)[self.world.rank :][:2]
        part = self.weights[start:stop]
        return start, part.cpu() if self.staging else part

    def send(self, gradient: torch.Tensor) -> "Future[torch.Tensor]":
        return self.ring.average_shard(
            gradient, f"bucket {self.number}",
            lambda shard: hvd.allgather_async(self.update(shard), name=f"updated {self.number}"),
        )  # fmt: skip

    def take(self, weights: torch.Tensor) -> None:
        self.write(weights)


class Sharded(Ring):
    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        for lane in self.exchange.lanes:
            parts = state_of(lane.optimizer, [lane.part]).items()
            gathered = {n: v if n == COUNT else lane.ring.gather(v, f"{n} {lane.number}").wait() for n, v in parts}
            yield lane.piece.start, gathered


def connect(job: Job, arrival: Arrival | None = None) -> Ring:
    if job.world.elastic:
        from hvdtrain.modes._elastic_sharded import ElasticSharded

        return ElasticSharded(job, arrival)
    return Sharded(job, ShardedLane)
