"""torch DistributedDataParallel over Gloo or NCCL: the all-reduce people would use without Horovod."""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

# DistributedDataParallel imports this when it is made, while the others wait for a worker to join.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from hvdtrain.base.numerics.flat import payload_bytes, trained
from hvdtrain.base.system import trace
from hvdtrain.job.buckets.gradient_check import GradientCheck
from hvdtrain.job.coordination.group import Group
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.store_group import StoreGroup
from hvdtrain.job.coordination.synchroniser import NO_STATE, OwnState, ring_traffic
from hvdtrain.job.rings.local_update import LocalUpdate
from hvdtrain.job.wire.heartbeat import UNLIMITED_S, end_when_silent, while_served

_GLOO = "gloo"
_NCCL = "cpu:gloo,cuda:nccl"
# The share of all steps, the first ones, whose gradients are averaged as they are before PowerSGD
# begins, as the hook's authors advise.
_EXACT_SHARE = 0.1
_EXACT_STEPS = 100  # how many such steps there are where nobody knows the number of all steps
# The names of PowerSGD's state in a snapshot. Each worker has its error, in the order of the
# weights; Q is the same on all workers, and begins at the vector's front.
_ERROR = "powersgd.error"
_Q = "powersgd.q"

# Buffers are averaged before an evaluation, as in every mode, not copied from one rank at every
# step. Before torch 2.15 this had another name.
_NAMED = inspect.signature(nn.parallel.DistributedDataParallel).parameters
BUFFERS_APART: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _NAMED else "broadcast_buffers": False
}

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


class Ddp(LocalUpdate):
    """A synchroniser whose gradients torch's reducer averages within backward.

    Workers wait for each other at the end of backward(), after the last gradient. The clock counts
    that as waiting.

    Attributes:
        hook: averages a bucket.
        low_rank: the state of PowerSGD (Vogels et al., 2019, arXiv:1905.13727), which has rank 1,
            begins with the last step's matrices, and adds what it left out to the next step.
        is_one_bucket: whether all gradients are one bucket: with PowerSGD over Gloo. The hook's
            all-reduces of a bucket follow each other, and those of two buckets would mix. Over NCCL
            a stream keeps them in order.
        options: arguments of DistributedDataParallel.
        order: the parameters in the order of that bucket, which torch changes after a reducer's
            first step.
    """

    hook: Hook = staticmethod(default_hooks.allreduce_hook)
    low_rank: powerSGD_hook.PowerSGDState | None = None
    is_one_bucket = False

    def __init__(self, job: Job, group: Group) -> None:
        super().__init__(job, group)
        self.options = dict(BUFFERS_APART)

    def share_weights(self, model: nn.Module) -> None:
        for tensor in model.state_dict().values():
            values = tensor.clone(memory_format=torch.contiguous_format)
            # Gloo knows no bool.
            dist.broadcast(values.view(torch.uint8) if values.dtype == torch.bool else values, 0)
            tensor.copy_(values)

    def prepare(self, model: nn.Module) -> nn.Module:
        self.message = payload_bytes(model)
        self._check_gradients(model)
        on_gpu = next(model.parameters()).device.type == "cuda"
        is_low_rank = self.config.compression == "powersgd"
        self.is_one_bucket = is_low_rank and self.backend == _GLOO
        if self.is_one_bucket:
            self.options["bucket_cap_mb"] = 2**20
        wrap: Any = nn.parallel.DistributedDataParallel
        self.module = wrap(model, **self.options)
        super().prepare(model)
        self.is_traced = trace.is_on and self.world.size > 1 and not on_gpu
        if is_low_rank:
            self.low_rank = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
            self.low_rank.start_powerSGD_iter = self._exact_steps()
            self.hook = self._average_low_rank
            self.order = self.parameters
        # Without a hook, the reducer averages as the default hook does.
        if self.is_traced or self.hook != default_hooks.allreduce_hook:
            self.register_hook()
        return self.module

    def _check_gradients(self, model: nn.Module) -> None:
        """Notes each parameter whose gradient the reducer takes.

        Without this check the reducer would report a missing gradient only in the next forward. The
        other workers would wait for this worker's buckets until then.
        """
        check = GradientCheck(model)
        self.gradient_check = check

        def note(number: int, parameter: nn.Parameter) -> None:
            if self.module.require_backward_grad_sync:
                check.note(number)

        for number, parameter in enumerate(trained(model)):
            parameter.register_post_accumulate_grad_hook(partial(note, number))

    def wait(self) -> None:
        assert self.gradient_check
        self.gradient_check.end_backward()

    def register_hook(self) -> None:
        """Has torch's reducer use the hook."""
        hook = _traced(self.hook) if self.is_traced else self.hook
        self.module.register_comm_hook(self.low_rank, hook)

    def restore(
        self, step: int, state: Mapping[str, torch.Tensor], own: OwnState = NO_STATE
    ) -> None:
        super().restore(step, state, own)
        if not self.low_rank:
            return
        # Torch's buckets change after the first step, unless there is one.
        fewest = 0 if self.is_one_bucket else 2
        self.low_rank.start_powerSGD_iter = max(fewest, self._exact_steps() - step)
        if not self.is_one_bucket or _Q not in state:
            return
        device = self.parameters[0].device
        left_out = own.tensors.get(_ERROR)
        if left_out is None or not own.is_own:
            left_out = torch.zeros(len(state[_Q]))
        rows = sum(len(p) for p in self.parameters if _columns(p))
        columns = sum(map(_columns, self.parameters))
        self.low_rank.error_dict[0] = left_out.to(device, copy=True)
        self.low_rank.p_memory_dict[0] = torch.empty(rows, device=device)
        self.low_rank.q_memory_dict[0] = state[_Q][:columns].to(device, copy=True)
        self.order = self.parameters

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        yield from super().optimizer_parts()
        if self.is_one_bucket and self.low_rank and 0 in self.low_rank.error_dict:
            q = _reordered(self.low_rank.q_memory_dict[0], self.order, self.parameters, _columns)
            yield 0, {_Q: q.cpu()}

    def own_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        yield from super().own_parts()
        if self.is_one_bucket and self.low_rank and 0 in self.low_rank.error_dict:
            error = _reordered(
                self.low_rank.error_dict[0], self.order, self.parameters, torch.Tensor.numel
            )
            yield 0, {_ERROR: error.cpu()}

    def _average_low_rank(self, state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """Averages a bucket by PowerSGD: a hook for torch's reducer."""
        assert self.low_rank
        before = self.order
        self.order = bucket.parameters()
        is_reordered = [*map(id, before)] != [*map(id, self.order)]
        if self.is_one_bucket and 0 in self.low_rank.error_dict and is_reordered:
            errors = self.low_rank.error_dict
            qs = self.low_rank.q_memory_dict
            errors[0] = _reordered(errors[0], before, self.order, torch.Tensor.numel)
            qs[0] = _reordered(qs[0], before, self.order, _columns)
        return powerSGD_hook.powerSGD_hook(self.low_rank, bucket)

    def _exact_steps(self) -> int:
        """Returns how many steps of the job come before PowerSGD begins: torch needs two."""
        return max(2, round(_EXACT_SHARE * self.steps)) if self.steps else _EXACT_STEPS

    def traffic(self, steps: int) -> tuple[int, int]:
        if not self.low_rank:
            return super().traffic(steps)
        exact = min(steps, self.low_rank.start_powerSGD_iter)
        payload = exact * self.message + 4 * self.low_rank.total_numel_after_compression
        return ring_traffic(self.world.size, payload)

    def set_accumulating(self, accumulating: bool) -> None:
        self.module.require_backward_grad_sync = not accumulating  # what its no_sync() sets

    def average(self, values: torch.Tensor) -> Callable[[], object]:
        values.div_(self.world.size)
        work: Any = dist.all_reduce(values, async_op=True)
        return work.wait  # type: ignore[no-any-return]


def _columns(parameter: torch.Tensor) -> int:
    """Returns the columns of the matrix that PowerSGD's hook makes of a parameter's gradient.

    0 where the hook sends the gradient as it is: P and Q have to be less than half of it.
    """
    rows = len(parameter)
    columns = parameter.numel() // rows
    return columns if 2 * (rows + columns) < rows * columns else 0


def _reordered(
    values: torch.Tensor,
    before: Sequence[torch.Tensor],
    after: Sequence[torch.Tensor],
    size: Callable[[torch.Tensor], int],
) -> torch.Tensor:
    """Returns a flat vector with the parameters' parts in another order.

    Args:
        values: the vector.
        before: the parameters in the order of the vector.
        after: the same parameters in the new order.
        size: returns how many elements of the vector a parameter has.
    """
    parts = dict(zip(map(id, before), values.split([size(p) for p in before]), strict=True))
    return torch.cat([parts[id(p)] for p in after])


def _traced(hook: Hook) -> Hook:
    """Returns the same hook, which also writes to the trace when a bucket is averaged."""

    def traced(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        began = time.perf_counter()
        size = bucket.buffer().nbytes
        averaged = hook(state, bucket)
        if not trace.is_recording():
            return averaged

        def done(future: Future[torch.Tensor]) -> torch.Tensor:
            trace.reduction(size, began)  # before the reducer goes on
            return future.value()

        return averaged.then(done)

    return traced


def backend_for(device: torch.device, share_gpu: bool) -> str:
    """Returns what torch.distributed carries gradients with: NCCL needs a GPU for each worker."""
    return _NCCL if device.type == "cuda" and not share_gpu else _GLOO


def join(job: Job) -> Ddp:
    """Joins torch's process group; blocks until all workers have."""
    backend = backend_for(job.device, job.config.share_gpu)
    world = job.world
    timeout = job.config.timeout
    store = job.meet()
    end_when_silent(world, store, timeout)
    with while_served():
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=UNLIMITED_S),
        )
    own_store = store if world.size > 1 else None
    sync = Ddp(job, StoreGroup(world, own_store, timeout, dist.destroy_process_group))
    sync.backend = backend
    return sync
