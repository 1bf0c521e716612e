"""torch DistributedDataParallel over Gloo or NCCL: the all-reduce people would use without Horovod."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.joining import Arrival
from hvdtrain.coordination.store_group import StoreGroup
from hvdtrain.coordination.synchroniser import ring_traffic
from hvdtrain.modes._local_update import LocalUpdate
from hvdtrain.numerics.flat import payload_bytes
from hvdtrain.system import trace

FAMILY = "ring"
ORDER = 2
COLOUR = "#1c9edc"
MARKER = "D"
OPTIONS = ("local_steps", "fragments", "outer", "outer_lr", "outer_momentum")
ELASTIC = True
COMPRESSIONS = ("none", "powersgd")
SHARES = ("equal", "measured")
WAIT_FOR = ("step",)  # torch's reducer ends backward with the last average


_EXACT_SHARE = 0.1  # of all steps, the first: averaged as they are, as the hook's authors advise
_EXACT_STEPS = 100  # where nobody knows how many there will be

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


class Ddp(LocalUpdate):
    """Its wait is the end of backward(), after the last gradient, where the clock sees it.

    Attributes:
        hook: averages a bucket.
        low_rank: of PowerSGD (Vogels et al., 2019, arXiv:1905.13727): rank 1, begun with the last step's, what is left
            out goes into the next step.
    """

    hook: Hook = staticmethod(default_hooks.allreduce_hook)
    low_rank: powerSGD_hook.PowerSGDState | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        self.message = payload_bytes(model)
        # Buffers are averaged before an evaluation, as in every mode, not copied from one rank at every step.
        wrap: Any = nn.parallel.DistributedDataParallel
        # The hook's all-reduces of a bucket follow each other; over Gloo, those of two buckets would mix.
        is_low_rank, on_gpu = self.config.compression == "powersgd", next(model.parameters()).device.type == "cuda"
        one_bucket = {"bucket_cap_mb": 2**20} if is_low_rank and not on_gpu else {}
        self.module = wrap(model, forward_sync_buffers=False, **one_bucket)
        self.begin_with(model)
        self.is_traced = trace.is_on and self.world.size > 1 and not on_gpu
        if is_low_rank:
            self.low_rank = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
            self.hook = powerSGD_hook.powerSGD_hook
            self._begin_low_rank(0)
        if self.is_traced or self.hook != default_hooks.allreduce_hook:  # which the reducer does without one
            self.register_hook()
        return self.module

    def register_hook(self) -> None:
        """Have torch's reducer take it."""
        self.module.register_comm_hook(self.low_rank, _traced(self.hook) if self.is_traced else self.hook)

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        super().restore(step, state)
        self._begin_low_rank(step)

    def _begin_low_rank(self, done: int) -> None:
        """Have PowerSGD begin at its step of the job, of which so many are done. Torch needs two steps before it."""
        if self.low_rank:
            first = round(_EXACT_SHARE * self.steps) if self.steps else _EXACT_STEPS
            self.low_rank.start_powerSGD_iter = max(2, first - done)

    def traffic(self, steps: int) -> tuple[int, int]:
        if not self.low_rank:
            return super().traffic(steps)
        exact = min(steps, self.low_rank.start_powerSGD_iter)
        payload = exact * self.message + 4 * self.low_rank.total_numel_after_compression
        return ring_traffic(self.world.size, payload)

    def set_accumulating(self, accumulating: bool) -> None:
        self.module.require_backward_grad_sync = not (accumulating or self.local)  # what its no_sync() sets

    def average(self, values: torch.Tensor) -> Callable[[], object]:
        values.div_(self.world.size)
        work: Any = dist.all_reduce(values, async_op=True)
        return work.wait  # type: ignore[no-any-return]


def _traced(hook: Hook) -> Hook:
    """The same, and a line in the trace when a bucket is averaged."""

    def traced(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        began, size = time.perf_counter(), bucket.buffer().nbytes
        averaged = hook(state, bucket)
        if not trace.is_recording():
            return averaged

        def done(future: Future[torch.Tensor]) -> torch.Tensor:
            trace.reduction(size, began)
            return future.value()

        return averaged.then(done)

    return traced


def connect(job: Job, arrival: Arrival | None = None) -> Ddp:
    if job.world.elastic:
        from hvdtrain.modes._elastic_ddp import ElasticDdp

        return ElasticDdp(job, arrival)
    with_nccl = job.device.type == "cuda" and not job.config.share_gpu
    backend = "cpu:gloo,cuda:nccl" if with_nccl else "gloo"
    world, timeout, store = job.world, job.config.timeout, job.meet()
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout)
    )
    sync = Ddp(job, StoreGroup(world, store if world.size > 1 else None, timeout, dist.destroy_process_group))
    sync.backend = backend
    return sync
