"""Rings by Horovod, which averages gradients bucket by bucket while backward computes the rest."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.futures import Future

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.clock import Stretch, Stretches
from hvdtrain.base.numerics.flat import flatten_weights, trained
from hvdtrain.base.numerics.optimizers import (
    COUNT,
    StepSettings,
    make_exchange_optimizer,
    restore_state,
    settings_of,
    state_of,
    use_settings,
)
from hvdtrain.base.numerics.threads import compute_on
from hvdtrain.base.system import terminal, trace
from hvdtrain.job.buckets.exchange import Exchange, Lane
from hvdtrain.job.buckets.local_rounds import BucketCarrier
from hvdtrain.job.buckets.partition import BucketRange, cut
from hvdtrain.job.buckets.staging import Staging
from hvdtrain.job.coordination.group import Group
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.store_group import StoreGroup
from hvdtrain.job.coordination.synchroniser import NO_STATE, OwnState, ring_traffic
from hvdtrain.job.wire import horovod
from hvdtrain.job.wire.heartbeat import TOLD_AFTER, UNLIMITED_S, end_when_silent
from hvdtrain.job.wire.horovod import wait_for_any

if TYPE_CHECKING:
    from torch.distributed import Store

# Bytes of gradients that are handed to Horovod at once. Horovod averages them in the order in which
# it has them.
UNDER_WAY = 32 * 2**20
# Where layers wait: at most so many buckets are ahead of one that the next forward needs first.
BUCKETS_AHEAD = 2
# For how long of a step's wait the thread that computes looks again and again, in seconds: a pause
# would outlast the wait for a small model's last bucket.
WITHOUT_PAUSE_S = 4e-3
FORGET = 0  # a handle that Horovod does not give: see Collectives.forget


@dataclass(frozen=True)
class Operation:
    """An operation of Horovod that is under way.

    Attributes:
        handle: Horovod's handle.
        following: takes the operation's result, begins the operation that follows, and returns its
            handle. None where nothing follows.
        future: takes the result of the last operation.
    """

    handle: int
    following: Callable[[Any], int] | None
    future: Any


class Collectives:
    """Horovod's operations on buckets.

    Args:
        device: the device of the optimizers.
        has_thread: whether a second thread waits for results. It is needed if an operation follows
            another. Otherwise the thread that computes waits itself (see complete), because a
            second thread would take processor time and the interpreter's lock from it.

    Attributes:
        updates: when optimizers were at work.
    """

    def __init__(self, device: torch.device, has_thread: bool = True) -> None:
        self.updates = Stretches(device)
        self._begun: SimpleQueue[Operation] = SimpleQueue()
        self._uncompleted: list[Operation] = []  # without a thread: what complete waits for
        if has_thread:
            threading.Thread(target=self._wait, args=(device,), name="ring", daemon=True).start()

    def average(self, tensor: torch.Tensor, name: str) -> "Future[torch.Tensor]":
        """Launches an all-reduce; returns the average over all ranks, in the tensor itself."""
        return self._result(lambda: hvd.allreduce_async_(tensor, op=hvd.Average, name=name))

    def average_shard(
        self, tensor: torch.Tensor, name: str, following: Callable[[torch.Tensor], int]
    ) -> "Future[torch.Tensor]":
        """Launches a reduce-scatter, and the operation that follows; returns the latter's result.

        Args:
            tensor: what is averaged.
            name: Horovod's name for it.
            following: takes this rank's shard of the average, [shard] float32, begins the operation
                that follows, and returns its handle.
        """
        return self._result(
            lambda: hvd.reducescatter_async(tensor, op=hvd.Average, name=name), following
        )

    def gather(self, tensor: torch.Tensor, name: str) -> "Future[torch.Tensor]":
        """Launches an all-gather; returns the concatenation of all ranks' tensors."""
        return self._result(lambda: hvd.allgather_async(tensor, name=name))

    def forget(self) -> None:
        """Discards all operations that are under way.

        Horovod is stopped next. After a restart it uses the numbers of handles again.
        """
        self._result(lambda: FORGET).wait()

    def _result(
        self, begin: Callable[[], int], following: Callable[[Any], int] | None = None
    ) -> "Future[torch.Tensor]":
        """Begins an operation; returns its result, or the exception that it ends with.

        Nothing is raised here: where Horovod has ended, backward goes on.

        Args:
            begin: begins the operation, and returns its handle.
            following: see Operation. The result is that of the operation that follows.
        """
        future: Any = Future()
        try:
            self._begun.put(Operation(begin(), following, future))
        except Exception as error:
            future.set_exception(error)
        return future

    def _wait(self, device: torch.device) -> None:
        """Takes results as they come.

        They may come in any order: the other ranks may have begun with another bucket.
        """
        compute_on(device)
        waiting: list[Operation] = []
        while True:
            if not waiting:
                waiting.append(self._begun.get())
            while not self._begun.empty():
                waiting.append(self._begun.get())
            forget = next((one for one in waiting if one.handle == FORGET), None)
            if forget:
                waiting.clear()
                forget.future.set_result(None)
                continue
            handles = [one.handle for one in waiting]
            done = wait_for_any(handles, self._begun.empty)
            if done is None:
                continue
            operation = waiting.pop(done)
            try:
                result = hvd.synchronize(operation.handle)
                if operation.following:
                    handle = operation.following(result)
                    waiting.append(Operation(handle, None, operation.future))
                else:
                    operation.future.set_result(result)
            except Exception as error:
                operation.future.set_exception(error)

    def complete(self, limit_s: float) -> bool:
        """Blocks until all results are there, and takes them. Without a thread only.

        Args:
            limit_s: how long to wait at most.

        Returns:
            Whether all results are there.
        """
        began = time.monotonic()
        until = began + limit_s
        waiting = self._uncompleted
        while not self._begun.empty():
            waiting.append(self._begun.get())
        while waiting:
            handles = [one.handle for one in waiting]
            without_pause_s = began + WITHOUT_PAUSE_S - time.monotonic()
            done = wait_for_any(handles, lambda: time.monotonic() < until, without_pause_s)
            if done is None:
                return False
            operation = waiting.pop(done)
            try:
                operation.future.set_result(hvd.synchronize(operation.handle))
            except Exception as error:
                operation.future.set_exception(error)
        return True


def as_float16(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as Horovod sends it at half the bytes."""
    packed, _ = hvd.Compression.fp16.compress(tensor)
    return packed  # type: ignore[no-any-return]


class RingLane(Lane):
    """A bucket's way around the ring, and the optimizer of the part that this rank updates.

    Args:
        number, bucket, weights, staging: see Lane.
        ring: averages the bucket.
        job: the job as this rank knows it.

    Attributes:
        start: where the part begins in the bucket.
        part: [elements] float32 of the bucket's weights, which the optimizer changes.
        payload: bytes that were handed over to be averaged so far, as they are sent.
        context: the optimizer's learning rate, or its settings for each group of parameters.
        only_averages: the average is left where the gradient was, for an optimizer that is not the
            lane's.
        sent: [bucket] float32, the gradient that was sent, and then the average, if
            `only_averages`. Whoever has used the average removes it.
    """

    context: StepSettings
    only_averages = False
    sent: torch.Tensor

    def __init__(
        self,
        number: int,
        bucket: BucketRange,
        weights: torch.Tensor,
        staging: Staging | None,
        ring: Collectives,
        job: Job,
    ) -> None:
        super().__init__(number, bucket, weights, staging)
        self.ring = ring
        self.world = job.world
        self.config = job.config
        self.start, self.part = self.choose_part()
        self.payload = 0
        self.optimizer = make_exchange_optimizer(job.config, [self.part], job.world.workers)

    def choose_part(self) -> tuple[int, torch.Tensor]:
        """Returns `start` and `part`: here, all of the bucket."""
        part = self.weights.cpu() if self.staging else self.weights
        return 0, part

    def take_step(self, gradient: torch.Tensor) -> torch.Tensor:
        """Takes the optimizer's step on this rank's part, and returns the part, [part] float32."""
        use_settings(self.optimizer, settings_of(self.context, self.group))
        self.part.grad = gradient
        with self.ring.updates.during():
            self.optimizer.step()
        self.part.grad = None
        return self.part


def _trace_reduction(lane: Lane, came: float, under_way: int) -> None:
    """Writes a reduction of a recorded step to the timeline of --trace."""
    if trace.is_recording():
        trace.reduction(lane.size, lane.sent_at)


def join(job: Job) -> tuple[StoreGroup, str]:
    """Finds the other workers, and starts Horovod.

    Returns:
        The workers, and what carries tensors on CPUs.
    """
    # Gloo's own limit, 30 s, would run while others still look at their images, and while buckets
    # are under way.
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(UNLIMITED_S))
    world = job.world
    met = None if world.starts_horovod else _meet(job)
    backend = horovod.join(world, met, job.config.ring_transport)
    store = met
    if not store and world.size > 1:
        store = _meet(job)
    return StoreGroup(world, store, job.config.timeout, horovod.leave), backend


def _meet(job: Job) -> "Store":
    """Returns the store that all ranks share.

    From now on this process ends when a process that it needs is silent.
    """
    store = job.meet()
    end_when_silent(job.world, store, job.config.timeout)
    return store


class Ring(BucketCarrier):
    """A synchroniser whose buckets Horovod averages.

    Args:
        job: the job as this rank knows it.
        group: this worker and the others.
        backend: what carries tensors on CPUs.
        make_lane: makes a bucket's lane, of RingLane's arguments.

    Attributes:
        only_averages: averages are left where gradients were, for an optimizer that is not the
            lanes'. To be set before `carry`. Averages then come when they are waited for.
        staged: gradients go through CPU memory: they are on a GPU, and Horovod has no NCCL or
            cannot use it.
    """

    exchange: Exchange
    only_averages = False
    _completes = False  # whether the thread that waits takes the results: see Collectives.complete

    def __init__(
        self, job: Job, group: Group, backend: str, make_lane: Callable[..., RingLane]
    ) -> None:
        self.job = job
        self.config = job.config
        self.world = job.world
        self.group = group
        self.make_lane = make_lane
        on_gpu = job.device.type == "cuda"
        self.staged = on_gpu and (job.config.share_gpu or not hvd.nccl_built())
        self.backend = "horovod-nccl" if on_gpu and not self.staged else backend
        self.waits_for_layers = job.waits_for_layers

    def prepare(self, model: nn.Module) -> nn.Module:
        self.share_weights(model)
        self.attach(model)
        return model

    def attach(self, model: nn.Module) -> None:
        """Takes the gradients of a model from now on. All workers have the same weights."""
        sizes = [p.numel() for p in trained(model)]
        self.carry(sizes, flatten_weights(model))
        self.exchange.attach(model, self.waits_for_layers)

    def carry(self, sizes: Sequence[int], weights: torch.Tensor) -> Sequence[BucketRange]:
        buckets = self.cut(sizes)
        # Staged buckets are sent by another thread, while the one that computes waits already.
        # A trace tells when each reduction ended.
        self._completes = self.only_averages and not self.staged and not trace.is_on
        self.collectives = Collectives(
            torch.device("cpu") if self.staged else weights.device,
            has_thread=not self._completes,
        )
        staging = Staging(weights, buckets) if self.staged else None
        lanes = [
            self.make_lane(number, bucket, weights, staging, self.collectives, self.job)
            for number, bucket in enumerate(buckets)
        ]
        for lane in lanes:
            lane.only_averages = self.only_averages
        room = self._room()
        self.exchange = Exchange(lanes, sizes, weights, staging, room, self._patience, self.tell)
        if trace.is_on:
            self.exchange.on_answered = _trace_reduction
        return buckets

    @property
    def _patience(self) -> float:
        """The seconds of a wait after which the user is told of it."""
        return TOLD_AFTER * self.config.timeout

    def _room(self) -> float:
        """Returns how many bytes of gradients are under way at once."""
        if self.only_averages:  # a step needs all of them
            return float("inf")
        if self.waits_for_layers:
            return BUCKETS_AHEAD * 4 * self.config.bucket_elements
        return UNDER_WAY

    def _complete(self) -> None:
        """Takes all results in this thread, if no other thread does."""
        if not self._completes:
            return
        times = 0
        while not self.collectives.complete(self._patience):
            times += 1
            self.exchange.tell_of_wait(times * self._patience)

    def tell(self, line: str) -> None:
        """Shows the user a line, where this is the worker that leads."""
        if self.group.leads:
            terminal.tell(line)

    def cut(self, sizes: Sequence[int]) -> list[BucketRange]:
        """Returns the buckets of parameters with so many elements each."""
        return cut(
            sizes, 1, self.config.bucket_elements, self.config.fragments, borders=self.borders
        )

    def exchange_for(self, config: RunConfig, borders: Sequence[int]) -> None:
        super().exchange_for(config, borders)
        self.job = replace(self.job, config=config)

    def share_weights(self, model: nn.Module) -> None:
        state = model.state_dict()
        shared = {}
        for name, tensor in state.items():
            on_device = tensor.cpu() if self.staged else tensor
            # Horovod takes no other memory format, such as channels_last, and no bool.
            values = on_device.contiguous()
            shared[name] = values.view(torch.uint8) if values.dtype == torch.bool else values
        hvd.broadcast_parameters(shared, root_rank=0)
        for name, tensor in state.items():
            if shared[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(shared[name])

    def restore(
        self, step: int, state: Mapping[str, torch.Tensor], own: OwnState = NO_STATE
    ) -> None:
        for lane in self.exchange.lanes:
            start = lane.bucket.start + lane.start
            places = slice(start, start + len(lane.part))
            of_part = {
                name: values if name == COUNT else values[places] for name, values in state.items()
            }
            restore_state(lane.optimizer, [lane.part], of_part)

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        if self.group.leads:
            for lane in self.exchange.lanes:
                yield lane.bucket.start, state_of(lane.optimizer, [lane.part])

    def set_accumulating(self, accumulating: bool) -> None:
        self.exchange.bucketer.accumulating = accumulating

    def begin(self, step: int, lr: float) -> None:
        self.exchange.begin(lr)

    def begin_carrying(self, lr: StepSettings, buckets: int, is_new_step: bool) -> None:
        self.exchange.begin(lr)

    def wait(self) -> None:
        """Waits for all weights; with --wait-for layer the layers of the next forward wait."""
        self.exchange.end_backward()
        if not self.waits_for_layers:
            self.refresh()

    def send(self, values: Mapping[int, torch.Tensor]) -> None:
        for number, of_bucket in values.items():
            self.exchange.send(number, of_bucket)

    def wait_for(self, numbers: Sequence[int]) -> None:
        self._complete()
        self.exchange.wait_for(numbers)

    def refresh(self) -> None:
        self._complete()
        self.exchange.wait_for_all()

    def mean_over_workers(self, values: torch.Tensor) -> torch.Tensor:
        # The barrier names a worker that does not come. Horovod would wait for ever.
        self.group.barrier()
        average = self.collectives.average(values, "mean")
        self._complete()
        return average.wait()

    @property
    def waits(self) -> Sequence[Stretch]:
        return self.exchange.waits

    def updates(self) -> Sequence[Stretch]:
        return self.collectives.updates.take()

    def traffic(self, steps: int) -> tuple[int, int]:
        return ring_traffic(self.world.size, sum(lane.payload for lane in self.exchange.lanes))
