"""Horovod's ring, which is started again among the workers that are there."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.base.errors import Failure
from hvdtrain.base.system.connections import OwnConnections
from hvdtrain.base.system.deadline import or_exit
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.rings.allreduce import AllReduceLane
from hvdtrain.job.rings.elastic import Elastic
from hvdtrain.job.rings.elastic_group import ElasticGroup
from hvdtrain.job.rings.restartable import RestartableRing
from hvdtrain.job.rings.ring import Ring, RingLane
from hvdtrain.job.wire import horovod

# Seconds within which one of Gloo's messages has to be sent: at 14 Mbit/s, 16 MB are.
GLOO_S = 10
# Seconds that Horovod may take to stop. Where it was not built by hvdtrain, Gloo may not hear that
# a message under way was cut off, and waits for GLOO_S.
STOP_S = 2 * GLOO_S
# Seconds that Horovod may take to start. It gives up by itself after GLOO_S.
START_S = 2 * GLOO_S


class HeldLane(AllReduceLane):
    """A lane that holds its average back until all workers have all averages."""

    average: torch.Tensor

    def take(self, average: torch.Tensor) -> None:
        self.average = average

    def apply(self) -> None:
        super().take(self.average)


class RestartableHorovod(RestartableRing):
    """A ring by Horovod.

    Args:
        inner: the plain ring, of HeldLanes.
        connections: see RestartableRing.
    """

    inner: Ring

    def __init__(self, inner: Ring, connections: OwnConnections) -> None:
        super().__init__(inner, connections)
        self._rendezvous: horovod.Rendezvous | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        self.inner.attach(model)
        return model

    def end(self) -> None:
        self.inner.collectives.forget()
        self.inner.exchange.begin_again()
        with or_exit(STOP_S, f"rank {self.inner.world.rank}: Horovod did not stop", see=""):
            horovod.leave()

    def offer(self) -> Any:
        """Returns this worker's host, and on the first worker where the others find each other."""
        if not self.inner.group.leads:
            return socket.gethostname(), ""
        self._rendezvous = horovod.Rendezvous(self.inner.world)
        return socket.gethostname(), self._rendezvous.address

    def start(self, workers: Sequence[int], place: int, offers: Mapping[int, Any]) -> None:
        self.workers = len(workers)
        hosts = [offers[worker][0] for worker in workers]
        rendezvous = offers[workers[0]][1] if len(workers) > 1 else ""
        problem = f"rank {self.inner.world.rank}: Horovod did not start again"
        with self.connections.opening(), or_exit(START_S, problem, see=""):
            horovod.join_anew(place, hosts, rendezvous)

    def settle(self) -> None:
        self._close_rendezvous()

    def abandon(self) -> None:
        self.connections.cut()
        self._close_rendezvous()
        self.inner.exchange.fail(Failure("a worker is lost"))

    def _close_rendezvous(self) -> None:
        if self._rendezvous:
            self._rendezvous.close()

    def wait(self) -> str:
        exchange = self.inner.exchange
        exchange.end_backward()  # raises what is wrong with the model
        try:
            exchange.wait_for_all()
        except Failure as error:
            self.connections.cut()  # so that the others do not wait for this worker
            return str(error)
        return ""

    def apply(self) -> None:
        for lane in self.inner.exchange.lanes:
            lane.apply()

    def take_payload(self) -> int:
        lanes = self.inner.exchange.lanes
        payload = sum(lane.payload for lane in lanes)
        for lane in lanes:
            lane.payload = 0
        return payload


def connect_elastic(
    job: Job,
    arrival: Arrival | None,
    make_lane: Callable[..., RingLane] = HeldLane,
    make_ring: Callable[[Ring, OwnConnections], RestartableHorovod] = RestartableHorovod,
) -> Elastic:
    """Finds the other workers.

    Args:
        job: the job as this rank knows it.
        arrival: the place of a worker that joins; None: it is there from the start.
        make_lane, make_ring: see Ring and RestartableHorovod.
    """
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(GLOO_S)
    group = ElasticGroup(job, arrival)
    inner = Ring(job, group, "horovod-gloo", make_lane)
    # Gloo waits five times GLOO_S for a worker that was to connect and is lost before it does.
    ring = make_ring(inner, OwnConnections(group.addresses, ends_listening=True))
    return Elastic(group, ring, joins=arrival is not None)
