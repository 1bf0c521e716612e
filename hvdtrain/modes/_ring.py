"""What modes share that average gradients by Horovod, bucket by bucket, while backward computes the rest."""

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.futures import Future

from hvdtrain.buckets.exchange import Exchange, Lane
from hvdtrain.buckets.local_steps import LocalSteps, LocalSynchroniser
from hvdtrain.buckets.partition import Piece, cut
from hvdtrain.buckets.staging import Staging
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.store_group import StoreGroup
from hvdtrain.coordination.synchroniser import ring_traffic
from hvdtrain.errors import Failure
from hvdtrain.numerics.flat import flatten_weights, payload_bytes, trained
from hvdtrain.numerics.optimizers import COUNT, make_exchange_optimizer, restore_state, set_lr, state_of
from hvdtrain.system import trace
from hvdtrain.wire import horovod
from hvdtrain.wire.horovod import wait_for_any

# Bytes of gradients that are handed to Horovod at once. Horovod averages them in the order in which it has them: where
# layers wait, no more than two buckets are ahead of one that the next forward needs first.
UNDER_WAY, BUCKETS_AHEAD = 32 * 2**20, 2
FORGET = 0  # a handle that Horovod does not give: see Collectives.forget


class Collectives:
    """Horovod's operations on buckets. A thread waits for them, so that what follows is done at once."""

    def __init__(self) -> None:
        self._handles: SimpleQueue[tuple[int, Callable[[Any], int] | None, Any]] = SimpleQueue()
        threading.Thread(target=self._wait, name="ring", daemon=True).start()

    def average(self, tensor: torch.Tensor, name: str, half: bool) -> "Future[torch.Tensor]":
        """The average over all ranks, [as tensor] float32; half: it travels as float16."""
        packed, _ = (hvd.Compression.fp16 if half else hvd.Compression.none).compress(tensor)
        return self._result(lambda: hvd.allreduce_async_(packed, op=hvd.Average, name=name))

    def average_shard(
        self, tensor: torch.Tensor, name: str, following: Callable[[torch.Tensor], int]
    ) -> "Future[torch.Tensor]":  # fmt: skip
        """What Horovod makes of this rank's shard of the average, [shard] float32.

        Args:
            following: takes the shard, and gives the handle of what Horovod does next.
        """
        return self._result(lambda: hvd.reducescatter_async(tensor, op=hvd.Average, name=name), following)

    def gather(self, tensor: torch.Tensor, name: str) -> "Future[torch.Tensor]":
        """Those of all ranks, one after the other."""
        return self._result(lambda: hvd.allgather_async(tensor, name=name))

    def forget(self) -> None:
        """Wait for nothing that is under way. Horovod stops next, which knows no handle then and gives each anew."""
        self._result(lambda: FORGET).wait()

    def _result(
        self, begin: Callable[[], int], following: Callable[[Any], int] | None = None
    ) -> "Future[torch.Tensor]":  # fmt: skip
        """What Horovod makes, or its exception: where it has ended, backward goes on.

        Args:
            begin: gives the handle of what it does.
            following: takes what that makes, and gives the handle of what comes next: the result is what it makes then.
        """
        future: Any = Future()
        try:
            self._handles.put((begin(), following, future))
        except Exception as error:
            future.set_exception(error)
        return future

    def _wait(self) -> None:
        """Take what is done, in whatever order that is: the other ranks may have begun with another bucket."""
        waiting: list[tuple[int, Callable[[Any], int] | None, Any]] = []
        while True:
            if not waiting:
                waiting.append(self._handles.get())
            while not self._handles.empty():
                waiting.append(self._handles.get())
            if forgotten := [future for handle, _, future in waiting if handle == FORGET]:
                waiting.clear()
                forgotten[0].set_result(None)
                continue
            done = wait_for_any([handle for handle, _, _ in waiting], self._handles.empty)
            if done is None:
                continue
            handle, following, future = waiting.pop(done)
            try:
                result = hvd.synchronize(handle)
                if following:
                    waiting.append((following(result), None, future))
                else:
                    future.set_result(result)
            except Exception as error:
                future.set_exception(error)


class RingLane(Lane):
    """A bucket's way around the ring, and the optimizer of the part of it that this rank updates.

    Attributes:
        start: where the part begins in the bucket.
        part: [elements] float32 of the bucket's weights, which the optimizer changes.
        context: the optimizer's learning rate.
    """

    context: float

    def __init__(
        self, number: int, piece: Piece, weights: torch.Tensor, staging: Staging | None, ring: Collectives, job: Job
    ) -> None:
        super().__init__(number, piece, weights, staging)
        self.ring, self.world, self.config = ring, job.world, job.config
        self.start, self.part = self.choose_part()
        self.optimizer = make_exchange_optimizer(job.config, [self.part], job.world.workers)

    def choose_part(self) -> tuple[int, torch.Tensor]:
        """See `start` and `part`: all of the bucket."""
        return 0, self.weights.cpu() if self.staging else self.weights

    def update(self, gradient: torch.Tensor) -> torch.Tensor:
        """Take the optimizer's step on this rank's part: [part] float32, which is returned."""
        set_lr(self.optimizer, self.context)
        self.part.grad = gradient
        self.optimizer.step()
        self.part.grad = None
        return self.part


def _trace_reduction(lane: Lane, came: float, under_way: int) -> None:
    """Write a reduction of a recorded step to the timeline of --trace."""
    if trace.is_recording():
        trace.reduction(lane.size, lane.sent_at)


class Ring(LocalSynchroniser):
    """
    Args:
        make_lane: takes what RingLane does.

    Attributes:
        staged: gradients go through CPU memory: they are on a GPU, and Horovod has no NCCL or cannot use it.
    """

    exchange: Exchange
    message: float

    def __init__(self, job: Job, make_lane: Callable[..., RingLane]) -> None:
        # Gloo's own limit, 30 s, would run while another host's workers still look at their images.
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(job.config.timeout)))
        self.job, self.config, self.world, self.make_lane = job, job.config, job.world, make_lane
        backend = self.join()
        on_gpu = job.device.type == "cuda"
        self.staged = on_gpu and (job.config.share_gpu or not hvd.nccl_built())
        self.backend = "horovod-nccl" if on_gpu and not self.staged else backend
        self.waits_for_layers = job.waits_for_layers
        self.outer_lr, _ = self.config.taken_outer(job.world.workers)

    def join(self) -> str:
        """Find the others: make `group`, and start Horovod. What carries tensors on CPUs."""
        job, world = self.job, self.world
        backend = horovod.join(world, None if world.starts_horovod else job.meet(), job.config.ring_transport)
        store = job.meet() if world.size > 1 else None
        self.group = StoreGroup(world, store, job.config.timeout, horovod.leave)
        return backend

    def prepare(self, model: nn.Module) -> nn.Module:
        self.share_weights(model)
        self.message = payload_bytes(model)
        sizes = [p.numel() for p in trained(model)]
        pieces = cut(sizes, 1, self.config.bucket_elements, self.config.fragments)
        weights, ring = flatten_weights(model), Collectives()
        if self.config.local_steps:
            self.local = LocalSteps(self.config, model, weights, pieces)
            weights = self.local.outer
        staging = Staging(weights, pieces) if self.staged else None
        lanes = [self.make_lane(number, piece, weights, staging, ring, self.job) for number, piece in enumerate(pieces)]
        room = BUCKETS_AHEAD * 4 * self.config.bucket_elements if self.waits_for_layers else UNDER_WAY
        self.exchange = Exchange(lanes, sizes, weights, staging, room, self.config.timeout)
        if not self.local:
            self.exchange.attach(model, self.waits_for_layers)
        if trace.is_on:
            self.exchange.on_answered = _trace_reduction
        return model

    def share_weights(self, model: nn.Module) -> None:
        """Give every worker the first one's."""
        # Horovod knows no bool: its bytes, in the same memory.
        state = {name: t.view(torch.uint8) if t.dtype == torch.bool else t for name, t in model.state_dict().items()}
        shared = {name: tensor.cpu() for name, tensor in state.items()} if self.staged else state
        hvd.broadcast_parameters(shared, root_rank=0)
        if self.staged:
            model.load_state_dict(shared)

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        if self.local:
            state = self.local.restore(step, state, self.world.worker)
        for lane in self.exchange.lanes:
            start = lane.piece.start + lane.start
            places = slice(start, start + len(lane.part))
            of_part = {name: values if name == COUNT else values[places] for name, values in state.items()}
            restore_state(lane.optimizer, [lane.part], of_part)

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        for lane in self.exchange.lanes if self.group.leads else ():
            yield lane.piece.start, state_of(lane.optimizer, [lane.part])
        if self.local:
            yield from self.local.parts(self.group)

    def set_accumulating(self, accumulating: bool) -> None:
        self.exchange.bucketer.accumulating = accumulating

    def begin(self, step: int, lr: float) -> None:
        self.exchange.begin(self.outer_lr if self.local else lr)
        if self.local:
            self.local.begin_step()
            if self.local.due:
                self.exchange.wait_for(self.local.due)
            self.local.begin(lr)

    def wait(self) -> None:
        if self.local:  # what a round came to leaves after its last update, and is waited for before the next forward
            return
        if missing := self.exchange.bucketer.incomplete():
            buckets = self.exchange.in_words(missing)
            raise Failure(f"{buckets} were not complete when backward ended: a layer had no part in it")
        if not self.waits_for_layers:
            self.exchange.wait_for_all()

    def update(self) -> None:
        if self.local:
            for number in self.local.step():
                self.exchange.send(number, self.local.difference(number))

    def refresh(self) -> None:
        self.exchange.wait_for_all()
        if self.local:
            self.local.show_outer()

    @property
    def waited_s(self) -> float:
        return self.exchange.waited_s if self.waits_for_layers or self.local else 0.0

    def traffic(self, steps: int) -> tuple[int, int]:
        return ring_traffic(self.world.size, 4 * self.local.sent if self.local else steps * self.message)
