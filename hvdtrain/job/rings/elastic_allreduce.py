"""Horovod's ring whose workers may be lost.

Horovod is stopped then, and started again among the workers that are there.
"""

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hvdtrain.base.errors import Failure
from hvdtrain.base.system.deadline import or_exit
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.rings.allreduce import AllReduceLane
from hvdtrain.job.rings.elastic import Elastic
from hvdtrain.job.rings.ring import Ring, RingLane
from hvdtrain.job.wire import horovod

# Seconds within which one of Gloo's messages has to be sent: at 14 Mbit/s, 16 MB are.
GLOO_S = 10
# Seconds that Horovod may take to stop. Gloo may not hear that a message under way was cut off, and
# waits for GLOO_S.
STOP_S = 2 * GLOO_S
# Seconds that Horovod may take to start. Where a worker is lost meanwhile, Horovod waits for it for
# ever, or for GLOO_S, and then ends the process without a word of ours.
FORM_S = 0.8 * GLOO_S


class HeldLane(AllReduceLane):
    """A lane that holds its average back until all workers have all averages."""

    average: torch.Tensor

    def take(self, average: torch.Tensor) -> None:
        self.average = average

    def apply(self) -> None:
        super().take(self.average)


class ElasticRing(Elastic, Ring):
    """A ring by Horovod whose workers may be lost."""

    def __init__(
        self, job: Job, arrival: Arrival | None, make_lane: Callable[..., RingLane] = HeldLane
    ) -> None:
        os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(GLOO_S)
        self.arrival = arrival
        super().__init__(job, make_lane)

    def join(self) -> str:
        self.meet(self.job, self.arrival)
        return "horovod-gloo"

    def share_weights(self, model: nn.Module) -> None:
        """Keeps the model. All workers have the same weights, by the seed or a snapshot."""
        self.model = model

    def offer(self) -> Any:
        rendezvous = horovod.serve_rendezvous(self.world) if self.group.leads else ""
        return socket.gethostname(), rendezvous

    def end_ring(self) -> None:
        if hasattr(self, "exchange"):
            self.collectives.forget()
            self.exchange.begin_again()
        with or_exit(STOP_S, f"rank {self.world.rank}: Horovod did not stop", see=""):
            horovod.leave()

    def form(self, place: int, given: Mapping[int, Any]) -> None:
        hosts = [given[worker][0] for worker in self.members]
        problem = (
            f"rank {self.world.rank}: one more worker may be lost, for Horovod did not start again"
        )
        with self.connections.opening(), or_exit(FORM_S, problem, see=""):
            horovod.join_anew(place, hosts, given[0][1] if len(hosts) > 1 else "")

    def abandon(self) -> None:
        self.connections.cut()
        if hasattr(self, "exchange"):
            self.exchange.fail(Failure("a worker is lost"))

    def take_payload(self) -> int:
        payload = sum(lane.payload for lane in self.exchange.lanes)
        for lane in self.exchange.lanes:
            lane.payload = 0
        return payload

    def wait(self) -> None:
        """Blocks until all workers have all averages, and takes the step."""
        self.exchange.end_backward()  # raises what is wrong with the model, not with the ring
        problem = ""
        try:
            self.exchange.wait_for_all()
        except Failure as error:
            problem = str(error)
            self.connections.cut()  # so that the others do not wait for this worker
        self.take_together(problem)
        self.apply()

    def apply(self) -> None:
        """Takes the step, which all workers take."""
        for lane in self.exchange.lanes:
            lane.apply()

    def refresh(self) -> None:
        self.together(self.exchange.wait_for_all)
