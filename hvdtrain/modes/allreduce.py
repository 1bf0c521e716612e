"""Horovod averages gradients over a ring while backward goes on; every worker applies the same update."""

import contextlib
import itertools
import math
import os
import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from hvdtrain.buckets.bucketer import Bucketer
from hvdtrain.buckets.partition import cut
from hvdtrain.buckets.staging import Staging
from hvdtrain.coordination.horovod_group import HorovodGroup
from hvdtrain.coordination.job import Job
from hvdtrain.errors import Failure
from hvdtrain.modes._synchroniser import LocalUpdate
from hvdtrain.numerics.flat import payload_bytes, trained, views
from hvdtrain.system import trace
from hvdtrain.wire.horovod import pause, wait_asleep

FAMILY = "ring"
ORDER = 1
COLOUR = "#0456c3"
MARKER = "s"
JOINS_HOROVOD = True
COMPRESSIONS = ("none", "fp16")  # what Horovod 0.28.1 can send


class StagedRing:
    """Averages a model's gradients over all ranks, as Horovod would have NCCL do it where there is none.

    A bucket that is complete is copied to pinned memory, averaged there by Horovod's own thread and copied back, each
    beside the computing of the next.

    Args:
        most: elements of a bucket.
        compression: one of Horovod's.
        timeout: seconds after which a bucket is given up.
    """

    def __init__(self, model: nn.Module, most: int, compression: Any, timeout: float) -> None:
        self.compression, self.timeout = compression, timeout
        self.parameters = trained(model)
        sizes = [p.numel() for p in self.parameters]
        self.pieces = cut(sizes, 1, most)
        self.average = torch.zeros(sum(sizes), device=self.parameters[0].device)
        self._staging = Staging(self.average, self.pieces)
        self._sent: SimpleQueue[tuple[int, Any, Any] | Exception] = SimpleQueue()  # bucket, handle, compression's own
        self.bucketer = Bucketer(
            sizes, self.pieces, lambda *own: self._staging.when_out(partial(self._send, *own), self._sent.put),
            self._staging,
        )  # fmt: skip
        self.bucketer.take_from(self.parameters, keep=True)

    def _send(self, number: int, gradient: torch.Tensor) -> None:
        """Begin to average a bucket."""
        packed, context = self.compression.compress(gradient)
        handle = hvd.allreduce_async_(packed, op=hvd.Average, name=f"bucket {number}")
        self._sent.put((number, handle, context))

    def wait(self) -> None:
        """Have every gradient be the average, for what is computed next.

        Raises:
            Failure: a bucket was not handed to Horovod in time.
            Exception: Horovod's or the GPU's, where it failed.
        """
        missing = set(range(len(self.pieces)))
        while missing:
            try:
                sent = self._sent.get(timeout=self.timeout)
            except Empty:
                raise Failure(
                    f"{len(missing)} of {len(self.pieces)} buckets of gradients, {min(missing)} among them, were not "
                    f"complete in CPU memory within {self.timeout:g} s (see --timeout)"
                ) from None
            if isinstance(sent, Exception):
                raise sent
            number, handle, context = sent
            missing.remove(number)
            wait_asleep([handle])
            self._staging.copy_in(number, self.compression.decompress(hvd.synchronize(handle), context))
        self._staging.wait_for(range(len(self.pieces)))
        for parameter, average in zip(self.parameters, views(self.average, self.parameters), strict=True):
            parameter.grad = average


class AllReduce(LocalUpdate):
    """
    Attributes:
        staged: gradients go through CPU memory: they are on a GPU, and Horovod has no NCCL or cannot use it.
    """

    optimizer: Any  # torch's, or Horovod's around it
    traced: "_Traced | None" = None

    def __init__(self, job: Job, group: HorovodGroup) -> None:
        super().__init__(job, group)
        on_gpu = job.device.type == "cuda"
        self.staged = on_gpu and (job.config.share_gpu or not hvd.nccl_built())
        self.backend = "horovod-nccl" if on_gpu and not self.staged else group.backend

    def prepare(self, model: nn.Module) -> nn.Module:
        half = self.config.compression == "fp16"
        self.compression = hvd.Compression.fp16 if half else hvd.Compression.none
        self.message = payload_bytes(model) / (1 + half)
        self.optimizer = self.make_optimizer(model)
        if self.staged:
            for tensor in model.state_dict().values():
                tensor.copy_(hvd.broadcast(tensor.cpu(), root_rank=0))
            self.ring = StagedRing(model, self.config.bucket_elements, self.compression, self.config.timeout)
        else:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=[(n, p) for n, p in model.named_parameters() if p.requires_grad],
                compression=self.compression, backward_passes_per_step=self.config.accumulate,
            )  # fmt: skip
            if trace.is_on and self.world.size > 1:
                self.traced = _Traced(self.optimizer)
        return model

    def set_accumulating(self, accumulating: bool) -> None:
        if self.staged:
            self.ring.bucketer.accumulating = accumulating

    def wait(self) -> None:
        if self.staged:
            self.ring.wait()
        elif self.world.size > 1:
            if self.traced:
                self.traced.wait()
            wait_asleep(handle for handle, _ in self.optimizer._handles.values())
            self.optimizer.synchronize()

    def update(self) -> None:
        with contextlib.nullcontext() if self.staged or self.world.size == 1 else self.optimizer.skip_synchronize():
            self.optimizer.step()


class _Traced:
    """Has Horovod's reductions written down: from when gradients were handed over until they were seen averaged.

    Horovod says when it is asked, which is at the next gradient, and while the step waits; gradients that are found
    done together count as one reduction, as which Horovod has fused them or not.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.under_way: dict[nn.Parameter, float] = {}  # when each was handed over, in that order
        hand_over = optimizer._allreduce_grad_async

        def traced(p: nn.Parameter) -> Any:
            if trace.is_recording():
                self._all_done()
                self.under_way[p] = time.perf_counter()
            return hand_over(p)

        optimizer._allreduce_grad_async = traced

    def wait(self) -> None:
        """Until all are averaged."""
        since = time.perf_counter()
        while not self._all_done():
            pause(since)

    def _all_done(self) -> bool:
        done = list(itertools.takewhile(lambda p: hvd.poll(self.optimizer._handles[p][0]), self.under_way))
        if done:
            trace.reduction(sum(p.nbytes for p in done), self.under_way[done[0]])
        for p in done:
            del self.under_way[p]
        return not self.under_way


def connect(job: Job) -> AllReduce:
    # Gloo's own limit, 30 s, would run while another host's workers still look at their images.
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(job.config.timeout)))
    store = None if job.world.starts_horovod else job.meet()
    return AllReduce(job, HorovodGroup(job.world, store))
