"""Horovod's ring whose workers may be lost: Horovod is stopped then, and started again among those that are there."""

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.joining import Arrival
from hvdtrain.errors import Failure
from hvdtrain.modes._elastic import Elastic
from hvdtrain.modes._ring import Ring, RingLane
from hvdtrain.modes.allreduce import AllReduceLane
from hvdtrain.system.deadline import or_exit
from hvdtrain.wire import horovod

GLOO_S = 10  # in which a message of Gloo's is through: at 14 Mbit/s one of 16 MB
FORM_S = 20.0  # that Horovod may take to start: where a worker is lost meanwhile, it can wait for that for ever


class HeldLane(AllReduceLane):
    """Keeps the average until all workers have all of theirs."""

    average: torch.Tensor

    def take(self, average: torch.Tensor) -> None:
        self.average = average

    def apply(self) -> None:
        super().take(self.average)


class ElasticRing(Elastic, Ring):
    def __init__(self, job: Job, arrival: Arrival | None, make_lane: Callable[..., RingLane] = HeldLane) -> None:
        os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(GLOO_S)
        self.arrival = arrival
        super().__init__(job, make_lane)

    def join(self) -> str:
        self.meet(self.job, self.arrival)
        return "horovod-gloo"

    def share_weights(self, model: nn.Module) -> None:
        """All have the first worker's: the seed or a snapshot decides, and that is checked."""
        self.model = model

    def offer(self) -> Any:
        return socket.gethostname(), horovod.serve_rendezvous(self.world) if self.group.leads else ""

    def form(self, place: int, given: Mapping[int, Any]) -> None:
        hosts = [given[worker][0] for worker in self.members]
        if hasattr(self, "exchange"):
            self.exchange.lanes[0].ring.forget()
            self.exchange.begin_again()
        problem = f"rank {self.world.rank}: one more worker may be lost, for Horovod did not start again"
        with self.connections.opening(), or_exit(FORM_S, problem, see=""):
            horovod.join_anew(place, hosts, given[0][1] if len(hosts) > 1 else "")

    def abandon(self) -> None:
        self.connections.cut()
        if hasattr(self, "exchange"):
            self.exchange.fail(Failure("a worker is lost"))

    def wait(self) -> None:
        """Also take the step, when all workers can."""
        problem = ""
        try:
            super().wait()
        except Failure as error:
            problem = str(error)
            self.connections.cut()  # so that the others do not wait for this worker
        self.take_together(problem)
        self.apply()

    def apply(self) -> None:
        for lane in self.exchange.lanes:
            lane.apply()

    def refresh(self) -> None:
        self.together(self.exchange.wait_for_all)
