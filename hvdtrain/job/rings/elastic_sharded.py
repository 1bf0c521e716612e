"""`sharded` whose workers may be lost: each rank keeps and updates the next rank's shard too.

A lost worker's part of the optimizer's state is then on the rank before it, up to date. This is
redundant computing, as Bamboo does for the stages of a pipeline (Thorpe et al., NSDI'23,
arXiv:2204.12013). Two neighbours that are lost before the ring is formed anew end the job. Rank 0's
shard has no second copy: the loss of rank 0 ends the job anyway.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from hvdtrain.base.system.connections import OwnConnections
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.rings import elastic_allreduce
from hvdtrain.job.rings.elastic import Elastic
from hvdtrain.job.rings.elastic_allreduce import RestartableHorovod
from hvdtrain.job.rings.restartable import StateLost, Together
from hvdtrain.job.rings.ring import Ring
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
        bounds = self.bounds(hvd.size())
        self.own = bounds[hvd.rank() + 1] - bounds[hvd.rank()]
        start, stop = self.part_bounds(hvd.size(), hvd.rank())
        return start, self.weights[start:stop]

    def part_bounds(self, ranks: int, rank: int) -> tuple[int, int]:
        """Returns where in the bucket a rank's shard begins, and where the next rank's ends."""
        bounds = self.bounds(ranks)
        return bounds[rank], bounds[min(rank + 2, ranks)]

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


class RestartableSharded(RestartableHorovod):
    """A sharded ring by Horovod, of HeldShards.

    Attributes:
        holders: the workers that have the optimizer's state, in the order of their shards. Empty on
            a worker that has none yet.
        coming: for each bucket, the optimizer's state of this rank's part in the ring that was
            started.
    """

    each_has_all = False

    def __init__(self, inner: Ring, connections: OwnConnections) -> None:
        super().__init__(inner, connections)
        self.holders: Sequence[int] = []
        self.coming: list[dict[str, torch.Tensor]] = []
        self._members: Sequence[int] = []
        self._sent_twice = 0  # bytes of gradients to the rank before, since take_sent

    def offer(self) -> Any:
        """Returns what each ring offers, who has which shards, and what the optimizer's state has.

        The last are the names of its entries and its count of steps.
        """
        state: dict[str, torch.Tensor] = {}
        if self.holders:
            lane = self.inner.exchange.lanes[0]
            state = state_of(lane.optimizer, [lane.part])
        count = state.pop(COUNT, torch.empty(0)).tolist()
        return *super().offer(), list(self.holders), list(state), count

    def start(self, workers: Sequence[int], place: int, offers: Mapping[int, Any]) -> None:
        """Starts a ring, and brings all weights and the optimizer's state to where they are kept.

        All workers have all weights afterwards.

        Raises:
            StateLost: two neighbours are lost, and with them the state of the latter's shard.
        """
        *_, holders, names, count = offers[workers[0]]
        lost = set(holders) - set(workers)
        _check_nothing_lost(holders, lost)
        super().start(workers, place, offers)
        self._members = workers
        self.coming = [{} for _ in self.inner.exchange.lanes]
        if not holders:
            return
        takes_over = self._next_holder() in lost
        for lane, state in zip(self.inner.exchange.lanes, self.coming, strict=True):
            own = len(lane.part) if takes_over else lane.own
            vectors = state_of(lane.optimizer, [lane.part])
            lane.write(self._gather(lane, lane.part[:own]))
            start, stop = lane.part_bounds(len(workers), place)
            if count:
                state[COUNT] = torch.tensor(count)
            for name in names:
                whole = self._gather(lane, vectors.get(name, lane.part)[:own])
                state[name] = whole[start:stop].clone()

    def _next_holder(self) -> int | None:
        """Returns the worker whose shard this worker has too; None where there is none."""
        if not self.holders:
            return None
        after = self.holders.index(self.inner.group.worker) + 1
        return self.holders[after] if after < len(self.holders) else None

    def settle(self) -> None:
        super().settle()
        self.holders = self._members
        for lane, state in zip(self.inner.exchange.lanes, self.coming, strict=True):
            lane.keep(state)

    def apply(self) -> None:
        """Takes the step, which all workers take from here on.

        Where a worker is lost before all have all new weights, the next step comes to nothing, and
        forming the ring anew brings the new weights.
        """
        exchange = self.inner.exchange
        for lane in exchange.lanes:
            average, _ = lane.came
            lane.gathers = True
            updated = lane.take_step(average[: len(lane.part)])
            exchange.send(lane.number, updated[: lane.own])
        try:
            exchange.wait_for_all()
        except Failure:
            self.abandon()
        else:
            for lane in exchange.lanes:
                lane.write(lane.came)
                lane.came = None
                lane.gathers = False
        if not self.inner.group.leads:
            self._sent_twice += sum(4 * lane.own for lane in exchange.lanes)

    def take_sent(self) -> int:
        sent = super().take_sent() + self._sent_twice
        self._sent_twice = 0
        return sent

    def optimizer_parts(self, together: Together) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        for lane in self.inner.exchange.lanes:
            yield lane.bucket.start, together(partial(self._gather_state, lane))

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
        self.inner.exchange.send(lane.number, values)
        self.inner.exchange.wait_for([lane.number])
        came: torch.Tensor = lane.came
        lane.came = None
        lane.gathers = False
        return came


def _check_nothing_lost(holders: Sequence[int], lost: Collection[int]) -> None:
    """Checks that of every two neighbours one is there.

    Raises:
        StateLost: two neighbours are lost.
    """
    orphans: set[int] = set()
    for neighbours in pairwise(holders):
        if set(lost).issuperset(neighbours):
            orphans.update(neighbours)
    if orphans:
        raise StateLost(
            f"workers {sorted(orphans)}, neighbours in the ring, are gone at once, and with them a "
            "shard's optimizer state: --resume goes on from the last snapshot, if there is one, as "
            "--retries does"
        )


def connect_elastic(job: Job, arrival: Arrival | None) -> Elastic:
    """Finds the other workers.

    Args:
        job: the job as this rank knows it.
        arrival: the place of a worker that joins; None: it is there from the start.
    """
    # Without fusion a message is one bucket, and is sent within GLOO_S.
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
    return elastic_allreduce.connect_elastic(job, arrival, HeldShard, RestartableSharded)
