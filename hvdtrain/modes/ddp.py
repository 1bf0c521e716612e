"""torch DistributedDataParallel over Gloo or NCCL: the all-reduce people would use without Horovod."""

import inspect
import time
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.store_group import StoreGroup
from hvdtrain.modes._local_update import LocalUpdate
from hvdtrain.numerics.flat import payload_bytes
from hvdtrain.system import trace

FAMILY = "ring"
ORDER = 2
COLOUR = "#1c9edc"
MARKER = "D"
SHARES = ("equal", "measured")
WAIT_FOR = ("step",)  # torch's reducer ends backward with the last average


class Ddp(LocalUpdate):
    """Its wait is the end of backward(), after the last gradient, where the clock sees it."""

    def prepare(self, model: nn.Module) -> nn.Module:
        self.message = payload_bytes(model)
        self.optimizer = self.make_optimizer(model)
        # Buffers are averaged before an evaluation, as in every mode, not copied from one rank at every step.
        wrap: Any = nn.parallel.DistributedDataParallel
        no_copies = "forward_sync_buffers"  # torch 2.11 calls it broadcast_buffers
        if no_copies not in inspect.signature(wrap).parameters:
            no_copies = "broadcast_buffers"
        self.module = wrap(model, **{no_copies: False})
        if trace.is_on and self.world.size > 1 and next(model.parameters()).device.type == "cpu":
            self.module.register_comm_hook(None, _traced_allreduce)
        return self.module

    def set_accumulating(self, accumulating: bool) -> None:
        self.module.require_backward_grad_sync = not accumulating  # what its no_sync() sets


def _traced_allreduce(state: None, bucket: GradBucket) -> Future[torch.Tensor]:
    """What DDP does with a bucket of gradients, and a line in the trace when it is done."""
    began, size = time.perf_counter(), bucket.buffer().nbytes
    averaged = default_hooks.allreduce_hook(cast(Any, None), bucket)  # of all workers
    if not trace.is_recording():
        return averaged

    def done(future: Future[torch.Tensor]) -> torch.Tensor:
        trace.reduction(size, began)
        return future.value()

    return averaged.then(done)


def connect(job: Job) -> Ddp:
    with_nccl = job.device.type == "cuda" and not job.config.share_gpu
    backend = "cpu:gloo,cuda:nccl" if with_nccl else "gloo"
    world, timeout, store = job.world, job.config.timeout, job.meet()
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout)
    )
    sync = Ddp(job, StoreGroup(world, store if world.size > 1 else None, timeout, dist.destroy_process_group))
    sync.backend = backend
    return sync
