"""All-reduce: Horovod averages gradients over a ring while backward goes on.

Every worker applies the same update.
"""

import torch
from torch.futures import Future

from hvdtrain.job.rings.ring import RingLane, as_float16


class AllReduceLane(RingLane):
    """A bucket whose average comes to every rank, which updates all of the bucket."""

    def send(self, gradient: torch.Tensor) -> "Future[torch.Tensor]":
        if self.only_averages:
            self.sent = gradient
        if self.config.compression == "fp16":
            gradient = as_float16(gradient)
        self.payload += gradient.nbytes
        return self.ring.average(gradient, f"bucket {self.number}")

    def take(self, average: torch.Tensor) -> None:
        if self.only_averages:
            is_there = average.data_ptr() == self.sent.data_ptr()  # averaged in place
            if not is_there:
                self.sent.copy_(average)
            return
        self.take_step(average.float())
        if self.staging:
            self.staging.copy_in(self.number, self.part)
