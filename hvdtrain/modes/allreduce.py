"""Horovod averages gradients over a ring while backward goes on; every worker applies the same update."""

import math
import os
import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from torch import nn

from hvdtrain.buckets.bucketer import Bucketer
from hvdtrain.buckets.partition import cut
from hvdtrain.buckets.staging import Staging
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.store_group import StoreGroup
from hvdtrain.errors import Failure
from hvdtrain.modes._local_update import LocalUpdate
from hvdtrain.numerics.flat import payload_bytes, trained, views
from hvdtrain.system import trace
from hvdtrain.wire import horovod
from hvdtrain.wire.horovod import wait_asleep

FAMILY = "ring"
ORDER = 1
COLOUR = "#0456c3"
MARKER = "s"
JOINS_HOROVOD = True
COMPRESSIONS = ("none", "fp16")  # what Horovod 0.28.1 can send


class Sent(NamedTuple):
    """A bucket that Horovod averages.

    Attributes:
        handle: Horovod's.
        context: of the compression.
        at: when it was handed over, by time.perf_counter.
    """

    number: int
    handle: int
    context: Any
    at: float


class Ring:
    """Averages a model's gradients over all ranks, in buckets, while backward computes the rest of them.

    Without staging Horovod averages where the gradients are. With it a bucket that is complete is copied from the GPU
    to pinned memory, averaged there by Horovod's thread and copied back, each while the next is computed.

    Args:
        most: elements of a bucket.
        compression: one of Horovod's.
        timeout: seconds after which a bucket that is staged is given up.
    """

    def __init__(self, model: nn.Module, most: int, compression: Any, timeout: float, staged: bool) -> None:
        self.compression, self.timeout = compression, timeout if staged else 0.0
        self.parameters = trained(model)
        sizes, device = [p.numel() for p in self.parameters], self.parameters[0].device
        self.pieces = cut(sizes, 1, most)
        self._staging = Staging(torch.zeros(sum(sizes), device=device), self.pieces) if staged else None
        self._sent: SimpleQueue[Sent | Exception] = SimpleQueue()
        self.bucketer = Bucketer(sizes, self.pieces, self._complete, self._staging, device)
        self.bucketer.take_from(self.parameters, keep=True)

    def _complete(self, number: int, gradient: torch.Tensor) -> None:
        send = partial(self._send, number, gradient)
        if self._staging:
            self._staging.when_out(send, self._sent.put)
        else:
            send()

    def _send(self, number: int, gradient: torch.Tensor) -> None:
        """Begin to average a bucket."""
        began = time.perf_counter()
        packed, context = self.compression.compress(gradient)
        handle = hvd.allreduce_async_(packed, op=hvd.Average, name=f"bucket {number}")
        self._sent.put(Sent(number, handle, context, began))

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
                staged = f"in CPU memory within {self.timeout:g} s (see --timeout)"
                where = staged if self._staging else "when backward ended: a layer had no part in it"
                raise Failure(
                    f"{len(missing)} of {len(self.pieces)} buckets of gradients, {min(missing)} among them, were not "
                    f"complete {where}"
                ) from None
            if isinstance(sent, Exception):
                raise sent
            missing.remove(sent.number)
            wait_asleep(sent.handle)
            average = self.compression.decompress(hvd.synchronize(sent.handle), sent.context)
            if trace.is_recording():
                trace.reduction(average.nbytes, sent.at)
            if self._staging:
                self._staging.copy_in(sent.number, average)
            else:
                self.bucketer.put_back(sent.number, average, self.parameters)
        if self._staging:
            self._staging.wait_for(range(len(self.pieces)))
            averages = views(self._staging.weights, self.parameters)
            for parameter, gradient in zip(self.parameters, averages, strict=True):
                parameter.grad = gradient


class AllReduce(LocalUpdate):
    """
    Attributes:
        staged: gradients go through CPU memory: they are on a GPU, and Horovod has no NCCL or cannot use it.
    """

    ring: Ring | None = None  # of several workers

    def __init__(self, job: Job, group: StoreGroup, backend: str) -> None:
        super().__init__(job, group)
        on_gpu = job.device.type == "cuda"
        self.staged = on_gpu and (job.config.share_gpu or not hvd.nccl_built())
        self.backend = "horovod-nccl" if on_gpu and not self.staged else backend

    def prepare(self, model: nn.Module) -> nn.Module:
        config, half = self.config, self.config.compression == "fp16"
        self.message = payload_bytes(model) / (1 + half)
        self.optimizer = self.make_optimizer(model)
        state = model.state_dict()
        shared = {name: tensor.cpu() for name, tensor in state.items()} if self.staged else state
        hvd.broadcast_parameters(shared, root_rank=0)
        if self.staged:
            model.load_state_dict(shared)
        if self.world.size > 1:
            compression = hvd.Compression.fp16 if half else hvd.Compression.none
            self.ring = Ring(model, config.bucket_elements, compression, config.timeout, self.staged)
        return model

    def set_accumulating(self, accumulating: bool) -> None:
        if self.ring:
            self.ring.bucketer.accumulating = accumulating

    def wait(self) -> None:
        if self.ring:
            self.ring.wait()


def connect(job: Job) -> AllReduce:
    # Gloo's own limit, 30 s, would run while another host's workers still look at their images.
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(job.config.timeout)))
    world = job.world
    backend = horovod.join(world, None if world.starts_horovod else job.meet())
    store = job.meet() if world.size > 1 else None
    return AllReduce(job, StoreGroup(world, store, job.config.timeout, horovod.leave), backend)
