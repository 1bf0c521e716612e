"""`sharded` whose workers may be lost: each rank keeps and updates the next rank's shard too.

A lost worker's part of the optimizer's state is then on the rank before it, up to date. This is
redundant computing, as Bamboo does for the stages of a pipeline (Thorpe et al., NSDI'23,
arXiv:2204.12013). Two neighbours that are lost before the ring is formed anew end the job. Rank 0's
shard has no second copy: the loss of rank 0 ends the job anyway.
"""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import horovod.torch as hvd
import torch
from torch.futures import Future

from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.optimizers import (
    COUNT,
    make_exchange_optimizer,
    restore_state,
    state_of,
)
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.rings.elastic_allreduce import ElasticRing
from hvdtrain.job.rings.sharded import ShardedLane


class HeldShard(ShardedLane):
    """A lane whose part is this rank's shard and the next rank's.

    The part is updated when all workers have all averages.

    Attributes:
        own: elements of this rank's shard.
        gathers: whether what is sent goes to all ranks, and is no gradient.
        came: the result of the last message.
    """

    own = 0
    gathers = False
    came: Any

    def choose_part(self) -> tuple[int, torch.Tensor]:
        """Returns the part in Horovod's ring as it is now, and sets `own`.

        A worker that joins has no part before it is in a ring.
        """
        if not hvd.is_initialized():
            return 0, self.weights[:0]
        # Where this shard begins, where it ends, and where the next one does, if there is one.
        bounds = self.bounds(hvd.size())[hvd.rank() :][:3]
        self.own = bounds[1] - bounds[0]
        return bounds[0], self.weights[bounds[0] : bounds[-1]]

    def keep(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes the part in the ring that was formed, with this state of the optimizer."""
        self.start, self.part = self.choose_part()
        self.optimizer = make_exchange_optimizer(self.config, [self.part], hvd.size())
        restore_state(self.optimizer, [self.part], state)

    def send(self, gradient: torch.Tensor) -> "Future[torch.Tensor]":
        if self.gathers:
            return self.ring.gather(gradient, f"gathered {self.number}")
        return self.average_shard(gradient, hvd.size(), self._send_to_keepers)

    def _send_to_keepers(self, shard: torch.Tensor) -> int:
        """Launches an all-to-all: this shard's average goes to the rank before and to this one.

        Both update the shard. Each has the averages of its part then, with the zeros behind them
        that the bucket has had.

        Returns:
            The all-to-all's handle.
        """
        lengths = torch.zeros(hvd.size(), dtype=torch.int32)
        lengths[max(0, hvd.rank() - 1) : hvd.rank() + 1] = len(shard)
        copies = shard.repeat(int((lengths > 0).sum()))
        return hvd.alltoall_async(copies, lengths, name=f"part {self.number}")

    def take(self, came: Any) -> None:
        self.came = came


class ElasticSharded(ElasticRing):
    """A sharded ring whose workers may be lost.

    Attributes:
        holders: the workers that have the optimizer's state, in the order of their shards.
        coming: for each bucket, the optimizer's state of this rank's part in a ring that is being
            formed.
        orphans: neighbours that are both gone: nobody has the state of the latter's shard any more.
    """

    each_has_all = False

    def __init__(self, job: Job, arrival: Arrival | None) -> None:
        self.holders: list[int] = []
        # Without fusion a message is one bucket, and is sent within GLOO_S.
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
        super().__init__(job, arrival, HeldShard)
        self.holders = self.members

    def offer(self) -> Any:
        """Returns, beside what a ring offers, who has which shards, and what their state is of."""
        lanes = self.exchange.lanes[:1] if self.holders else []
        state = state_of(lanes[0].optimizer, [lanes[0].part]) if lanes else {}
        count = state.pop(COUNT, torch.empty(0)).tolist()
        return *super().offer(), self.holders, list(state), count

    def form(self, place: int, given: Mapping[int, Any]) -> None:
        """Forms a ring, and brings all weights and the optimizer's state to where they are kept.

        All workers have all weights afterwards.
        """
        *_, holders, names, count = given[0]
        lost = set(holders) - set(self.members)
        orphans: set[int] = set()
        for neighbours in pairwise(holders):
            if lost.issuperset(neighbours):
                orphans.update(neighbours)
        self.orphans = sorted(orphans)
        self.coming: list[dict[str, torch.Tensor]] = []
        if self.orphans:
            return
        super().form(place, given)
        after = holders.index(self.group.worker) + 1 if self.holders else len(holders)
        takes_over = after < len(holders) and holders[after] in lost
        if not holders:
            return
        for lane in self.exchange.lanes:
            start, *_, stop = lane.bounds(len(self.members))[place:][:3]
            there = len(lane.part) if takes_over else lane.own
            vectors = state_of(lane.optimizer, [lane.part])
            lane.write(self._gather(lane, lane.part[:there]))
            state = {COUNT: torch.tensor(count)} if count else {}
            for name in names:
                whole = self._gather(lane, vectors.get(name, lane.part)[:there])
                state[name] = whole[start:stop].clone()
            self.coming.append(state)

    def formed(self) -> bool:
        formed = super().formed()
        if self.orphans:
            raise Failure(
                f"workers {self.orphans}, neighbours in the ring, are gone at once, and with them a shard's optimizer "
                "state: --resume goes on from the last snapshot, if there is one, as --retries does"
            )
        if formed and self.coming:
            self.holders = self.members
            for lane, state in zip(self.exchange.lanes, self.coming, strict=True):
                lane.keep(state)
        return formed

    def apply(self) -> None:
        """Takes the step, which all workers take from here on.

        Where a worker is lost before all have all new weights, the next step comes to nothing, and
        forming the ring anew brings the new weights.
        """
        for lane in self.exchange.lanes:
            average, _ = lane.came
            lane.gathers = True
            updated = lane.update(average[: len(lane.part)])
            self.exchange.send(lane.number, updated[: lane.own])
        try:
            self.exchange.wait_for_all()
        except Failure:
            self.abandon()
        else:
            for lane in self.exchange.lanes:
                lane.write(lane.came)
                lane.came = None
                lane.gathers = False
        if not self.group.leads:  # the gradients of its shard, to the rank before
            self._moved += sum(4 * lane.own for lane in self.exchange.lanes)

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        for lane in self.exchange.lanes:
            yield lane.bucket.start, self.together(partial(self._gather_state, lane))

    def _gather_state(self, lane: HeldShard) -> dict[str, torch.Tensor]:
        """Returns the optimizer's state of a whole bucket."""
        state = {}
        for name, values in state_of(lane.optimizer, [lane.part]).items():
            whole = values if name == COUNT else self._gather(lane, values[: lane.own])
            state[name] = whole
        return state

    def _gather(self, lane: HeldShard, values: torch.Tensor) -> torch.Tensor:
        """Returns the concatenation of all ranks' tensors."""
        lane.gathers = True
        self.exchange.send(lane.number, values)
        self.exchange.wait_for([lane.number])
        came = lane.came
        lane.came = None
        lane.gathers = False
        return came
