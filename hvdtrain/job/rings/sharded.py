"""Sharded rings: each worker updates a shard of the weights, and sends it to all (ZeRO-1).

A ring that is a server beside every worker: reduce-scatter, the optimizer on each rank's shard,
all-gather (Rajbhandari et al., SC'20, arXiv:1910.02054, section 5.1). It sends what an all-reduce
does, and each rank has a part of the optimizer's state.
"""

from collections.abc import Callable, Iterator, Sequence

import horovod.torch as hvd
import torch
from torch.futures import Future

from hvdtrain.base.numerics.optimizers import COUNT, state_of
from hvdtrain.job.buckets.partition import BucketRange, cut, shard_bounds
from hvdtrain.job.rings.ring import Ring, RingLane


def evened(values: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the values, [at most length], with zeros behind them up to that length."""
    lacking = length - len(values)
    return torch.nn.functional.pad(values, (0, lacking)) if lacking else values


class ShardedLane(RingLane):
    """A bucket of which this rank updates a shard. Other ranks update the other shards.

    If the bucket's length is not a multiple of the number of ranks, zeros are appended when it is
    sent, so that all shards have one length. Horovod 0.28.1 over NCCL needs that: when it fuses
    messages, rank r receives at r times the length of the first shard. With unequal shards that
    may be outside its own shard (nccl_operations.cc, NCCLReducescatter::Execute).
    """

    def bounds(self, ranks: int) -> list[int]:
        """Returns where in the bucket the ranks' shards begin, and where the last shard ends."""
        return shard_bounds(len(self.weights), ranks)

    def choose_part(self) -> tuple[int, torch.Tensor]:
        bounds = self.bounds(self.world.size)
        start = bounds[self.world.rank]
        stop = bounds[self.world.rank + 1]
        part = self.weights[start:stop]
        return start, part.cpu() if self.staging else part

    def average_shard(
        self, gradient: torch.Tensor, ranks: int, following: Callable[[torch.Tensor], int]
    ) -> "Future[torch.Tensor]":
        """Launches Collectives.average_shard, with shards of one length on all ranks."""
        self.payload += gradient.nbytes
        each = self.bounds(ranks)[1]
        return self.ring.average_shard(
            evened(gradient, each * ranks), f"bucket {self.number}", following
        )

    def send(self, gradient: torch.Tensor) -> "Future[torch.Tensor]":
        return self.average_shard(gradient, self.world.size, self._update_and_gather)

    def _update_and_gather(self, shard: torch.Tensor) -> int:
        """Updates this rank's part of the weights, and launches an all-gather of all parts.

        Returns:
            The all-gather's handle.
        """
        updated = self.take_step(shard[: len(self.part)])
        return hvd.allgather_async(evened(updated, len(shard)), name=f"updated {self.number}")  # type: ignore[no-any-return]

    def take(self, weights: torch.Tensor) -> None:
        self.write(weights[: len(self.weights)])


class Sharded(Ring):
    """A ring in which each rank has a part of the optimizer's state."""

    def cut(self, sizes: Sequence[int]) -> list[BucketRange]:
        """Cuts at multiples of the ranks, so that few buckets need zeros behind them."""
        return cut(
            sizes,
            1,
            self.config.bucket_elements,
            multiple=self.world.size,
            borders=self.borders,
        )

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        for lane in self.exchange.lanes:
            gathered = {}
            for name, values in state_of(lane.optimizer, [lane.part]).items():
                if name == COUNT:
                    gathered[name] = values
                else:
                    gathered[name] = lane.ring.gather(values, f"{name} {lane.number}").wait()
            yield lane.bucket.start, gathered
