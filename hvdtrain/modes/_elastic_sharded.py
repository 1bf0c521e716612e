"""`sharded` whose workers may be lost: each rank keeps and updates the next rank's shard too.

So a lost worker's part of the optimizer's state is with the rank before it, as up to date as it was: redundant
computing, as Bamboo does for the stages of a pipeline (Thorpe et al., NSDI'23, arXiv:2204.12013). Two neighbours that
are lost before the ring is formed anew end the job. Rank 0's shard has no second copy; its loss ends the job anyway.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import horovod.torch as hvd
import torch
from torch.futures import Future

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.joining import Arrival
from hvdtrain.errors import Failure
from hvdtrain.modes._elastic_allreduce import ElasticRing
from hvdtrain.modes.sharded import ShardedLane
from hvdtrain.numerics.optimizers import COUNT, make_exchange_optimizer, restore_state, state_of


class HeldShard(ShardedLane):
    """The part is this rank's shard and the next one's. It is updated when all workers have all averages.

    Attributes:
        own: elements of this rank's shard.
        gathers: what is sent goes to all ranks, and is no gradient.
        came: what the last message came to.
    """

    own, gathers = 0, False
    came: Any

    def choose_part(self) -> tuple[int, torch.Tensor]:
        """That of Horovod's ring now, of which `own` is set; a worker that joins has none before it is in one."""
        if not hvd.is_initialized():
            return 0, self.weights[:0]
        bounds = self.bounds(hvd.size())[hvd.rank() :][:3]
        self.own = bounds[1] - bounds[0]
        return bounds[0], self.weights[bounds[0] : bounds[-1]]

    def keep(self, state: Mapping[str, torch.Tensor]) -> None:
        """Have the part of the ring that was formed; the optimizer's state of it."""
        self.start, self.part = self.choose_part()
        self.optimizer = make_exchange_optimizer(self.config, [self.part], hvd.size())
        restore_state(self.optimizer, [self.part], state)

    def send(self, gradient: torch.Tensor) -> "Future[torch.Tensor]":
        if self.gathers:
            return self.ring.gather(gradient, f"gathered {self.number}")
        return self.ring.average_shard(gradient, f"bucket {self.number}", self._send_to_keepers)

    def _send_to_keepers(self, shard: torch.Tensor) -> int:
        """Send the average of this rank's shard to those who update it, the rank before and this one: each has that of
        its part then.
        """
        lengths = torch.zeros(hvd.size(), dtype=torch.int32)
        lengths[max(0, hvd.rank() - 1) : hvd.rank() + 1] = len(shard)
        copies = shard.repeat(int((lengths > 0).sum()))
        return hvd.alltoall_async(copies, lengths, name=f"part {self.number}")

    def take(self, came: Any) -> None:
        self.came = came


class ElasticSharded(ElasticRing):
    """
    Attributes:
        holders: the workers that have the optimizer's state, in the order of their shards.
        coming: of each bucket, the state of the part in a ring that is being formed.
        orphans: neighbours that are both gone: nobody has the state of the latter's shard any more.
    """

    each_has_all = False

    def __init__(self, job: Job, arrival: Arrival | None) -> None:
        self.holders: list[int] = []
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"  # a message is one bucket's, and through in GLOO_S
        super().__init__(job, arrival, HeldShard)
        self.holders = self.members

    def offer(self) -> Any:
        """And who has which shards, and what their state consists of."""
        lanes = self.exchange.lanes[:1] if self.holders else []
        state = state_of(lanes[0].optimizer, [lanes[0].part]) if lanes else {}
        count = state.pop(COUNT, torch.empty(0)).tolist()
        return *super().offer(), self.holders, list(state), count

    def form(self, place: int, given: Mapping[int, Any]) -> None:
        """Also bring all weights to all workers, and the optimizer's state to where it is kept from now on."""
        *_, holders, names, count = given[0]
        lost = set(holders) - set(self.members)
        self.orphans = sorted({worker for pair in pairwise(holders) if lost.issuperset(pair) for worker in pair})
        self.coming: list[dict[str, torch.Tensor]] = []
        if self.orphans:
            return
        super().form(place, given)
        after = holders.index(self.group.worker) + 1 if self.holders else len(holders)
        takes_over = after < len(holders) and holders[after] in lost
        for lane in self.exchange.lanes if holders else ():
            start, *_, stop = lane.bounds(len(self.members))[place:][:3]
            there = len(lane.part) if takes_over else lane.own
            vectors = {"": lane.part} | state_of(lane.optimizer, [lane.part])
            state = {COUNT: torch.tensor(count)} if count else {}
            for name in ["", *names]:
                whole = self._gather(lane, vectors.get(name, lane.part)[:there])
                if name:
                    state[name] = whole[start:stop].clone()
                else:
                    lane.write(whole)
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
        """All take the step, from here on. Where a worker is lost before all have all new weights, the next step comes
        to nothing, and forming the ring anew brings the new weights.
        """
        for lane in self.exchange.lanes:
            average, _ = lane.came
            lane.gathers = True
            self.exchange.send(lane.number, lane.update(average)[: lane.own])
        try:
            self.exchange.wait_for_all()
        except Failure:
            self.abandon()
        else:
            for lane in self.exchange.lanes:
                lane.write(lane.came)
                lane.came, lane.gathers = None, False
        if not self.group.leads:  # the gradients of its shard, to the rank before
            self._moved += round(self.message / len(self.members))

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        def gathered() -> dict[str, torch.Tensor]:
            parts = state_of(lane.optimizer, [lane.part]).items()
            return {name: v if name == COUNT else self._gather(lane, v[: lane.own]) for name, v in parts}

        for lane in self.exchange.lanes:
            yield lane.piece.start, self.together(gathered)

    def _gather(self, lane: HeldShard, values: torch.Tensor) -> torch.Tensor:
        """Those of all ranks, one after the other."""
        lane.gathers = True
        self.exchange.send(lane.number, values)
        self.exchange.wait_for([lane.number])
        came, lane.came, lane.gathers = lane.came, None, False
        return came
