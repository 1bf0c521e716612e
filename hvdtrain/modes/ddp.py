"""torch DistributedDataParallel over Gloo or NCCL: the all-reduce people would use without Horovod."""

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # as DistributedDataParallel does when it is made, for which the others wait where a worker joins
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from hvdtrain.buckets.local_steps import OF_WORKER, parts_of_workers
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
# What a snapshot has of PowerSGD: of each worker, in the order of the weights, what it left out, and all Q, in front.
_ERROR, _Q = "error", "powersgd.q"

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


class Ddp(LocalUpdate):
    """Its wait is the end of backward(), after the last gradient, where the clock sees it.

    Attributes:
        hook: averages a bucket.
        low_rank: of PowerSGD (Vogels et al., 2019, arXiv:1905.13727): rank 1, begun with the last step's, what is left
            out goes into the next step.
        is_one_bucket: all gradients are, with PowerSGD over Gloo: the hook's all-reduces of a bucket follow each other,
            and those of two would mix.
        order: of the parameters in that bucket, which torch changes after a reducer's first step.
    """

    hook: Hook = staticmethod(default_hooks.allreduce_hook)
    low_rank: powerSGD_hook.PowerSGDState | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        self.message = payload_bytes(model)
        # Buffers are averaged before an evaluation, as in every mode, not copied from one rank at every step.
        wrap: Any = nn.parallel.DistributedDataParallel
        is_low_rank, on_gpu = self.config.compression == "powersgd", next(model.parameters()).device.type == "cuda"
        self.is_one_bucket = is_low_rank and not on_gpu
        self.module = wrap(model, forward_sync_buffers=False, **{"bucket_cap_mb": 2**20} if self.is_one_bucket else {})
        super().prepare(model)
        self.is_traced = trace.is_on and self.world.size > 1 and not on_gpu
        if is_low_rank:
            self.low_rank = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
            self.hook, self.order = self._average_low_rank, self.parameters
            self.low_rank.start_powerSGD_iter = self._exact_steps()
        if self.is_traced or self.hook != default_hooks.allreduce_hook:  # which the reducer does without one
            self.register_hook()
        return self.module

    def register_hook(self) -> None:
        """Have torch's reducer take it."""
        self.module.register_comm_hook(self.low_rank, _traced(self.hook) if self.is_traced else self.hook)

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        super().restore(step, state)
        if not self.low_rank:
            return
        # Torch's buckets change after the first step, unless there is one.
        self.low_rank.start_powerSGD_iter = max(0 if self.is_one_bucket else 2, self._exact_steps() - step)
        if self.is_one_bucket and _Q in state:
            own = state.get(f"{OF_WORKER}{self.world.worker}.{_ERROR}", torch.zeros(len(state[_Q])))
            self.low_rank.error_dict[0] = own.clone()
            self.low_rank.p_memory_dict[0] = torch.empty(sum(len(p) for p in self.parameters if _columns(p)))
            self.low_rank.q_memory_dict[0] = state[_Q][: sum(map(_columns, self.parameters))].clone()
            self.order = self.parameters

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        yield from super().optimizer_parts()
        if self.is_one_bucket and self.low_rank and 0 in self.low_rank.error_dict:
            yield 0, {_Q: _reordered(self.low_rank.q_memory_dict[0], self.order, self.parameters, _columns)}
            error = _reordered(self.low_rank.error_dict[0], self.order, self.parameters, torch.Tensor.numel)
            yield from parts_of_workers(self.group, {_ERROR: error})

    def _average_low_rank(self, state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """The hook of PowerSGD."""
        assert self.low_rank
        before, self.order = self.order, bucket.parameters()
        if self.is_one_bucket and 0 in self.low_rank.error_dict and [*map(id, before)] != [*map(id, self.order)]:
            for memory, size in (self.low_rank.error_dict, torch.Tensor.numel), (self.low_rank.q_memory_dict, _columns):
                memory[0] = _reordered(memory[0], before, self.order, size)
        return powerSGD_hook.powerSGD_hook(self.low_rank, bucket)

    def _exact_steps(self) -> int:
        """The steps of the job before PowerSGD begins: torch needs two."""
        return max(2, round(_EXACT_SHARE * self.steps)) if self.steps else _EXACT_STEPS

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


def _columns(parameter: torch.Tensor) -> int:
    """Of the matrix that the hook makes of its gradient, if it sends it as P and Q: they are less than half of it."""
    rows = len(parameter)
    columns = parameter.numel() // rows
    return columns if 2 * (rows + columns) < rows * columns else 0


def _reordered(
    values: torch.Tensor, before: list[torch.Tensor], after: list[torch.Tensor], size: Callable[[torch.Tensor], int]
) -> torch.Tensor:  # fmt: skip
    """A flat vector of so many elements for each parameter, of which the order was another."""
    parts = dict(zip(map(id, before), values.split([size(p) for p in before]), strict=True))
    return torch.cat([parts[id(p)] for p in after])


def _traced(hook: Hook) -> Hook:
    """The same, and a line in the trace when a bucket is averaged."""

    def traced(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        began, size = time.perf_counter(), bucket.buffer().nbytes
        averaged = hook(state, bucket)
        if not trace.is_recording():
            return averaged

        def done(future: Future[torch.Tensor]) -> torch.Tensor:
            trace.reduction(size, began)  # before the reducer goes on
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
