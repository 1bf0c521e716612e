"""Horovod averages gradients over a ring while backward goes on; every worker applies the same update."""

import torch
from torch.futures import Future

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.joining import Arrival
from hvdtrain.modes._ring import Ring, RingLane

FAMILY = "ring"
ORDER = 1
COLOUR = "#0456c3"
MARKER = "s"
ELASTIC = True
JOINS_HOROVOD = True
COMPRESSIONS = ("none", "fp16")  # what Horovod 0.28.1 can send
OPTIONS = ("local_steps", "fragments", "outer", "outer_lr", "outer_momentum", "bucket_mb", "ring_transport")
SHARES = ("equal", "measured")
WAIT_FOR = ("step", "layer")


class AllReduceLane(RingLane):
    """The average of the bucket's gradients comes to every rank, which updates all of it."""

    def send(self, gradient: torch.Tensor) -> "Future[torch.Tensor]":
        return self.ring.average(gradient, f"bucket {self.number}", self.config.compression == "fp16")

    def take(self, average: torch.Tensor) -> None:
        self.update(average.float())
        if self.staging:
            self.staging.copy_in(self.number, self.part)


def connect(job: Job, arrival: Arrival | None = None) -> Ring:
    if job.world.elastic:
        from hvdtrain.modes._elastic_allreduce import ElasticRing

        return ElasticRing(job, arrival)
    return Ring(job, AllReduceLane)
