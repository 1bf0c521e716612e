"""A worker's end of the parameter server: it pushes gradients and pulls weights."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.futures import Future

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.clock import Stretch
from hvdtrain.base.numerics.flat import flatten_weights, trained
from hvdtrain.base.numerics.optimizers import COUNT, OPTIONS, StepSettings
from hvdtrain.base.system import trace
from hvdtrain.base.system.preempt import note_servers_request
from hvdtrain.base.system.terminal import tell
from hvdtrain.job.buckets.local_rounds import LeasingCarrier
from hvdtrain.job.buckets.partition import BucketRange, cut
from hvdtrain.job.buckets.send_queue import with_used_buckets
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.coordination.server_group import ServerGroup
from hvdtrain.job.coordination.synchroniser import NO_STATE, OwnState
from hvdtrain.job.ps.push_exchange import PushExchange
from hvdtrain.job.ps.push_trace import PushTrace
from hvdtrain.job.wire.heartbeat import TOLD_AFTER, wait_for_ranks
from hvdtrain.job.wire.messages import PushStatus
from hvdtrain.job.wire.shared import SharedMemory
from hvdtrain.job.wire.wire import start
from hvdtrain.runs.join_info import servers_return

INSTALLED = "installed"  # a key in the store, once every server has its weights
# In a worker's part of a snapshot: what its codecs add to the next push.
LEFT_OUT = "compression.left_out"


class PushPull(LeasingCarrier):
    """Pushes gradients to the servers as backward computes them, and gets new weights back.

    The answer to a push has the bucket's new weights. In the next forward each layer waits for its
    weights, or with --wait-for step `begin` waits for all. The optimizer runs on the servers.

    Without a push, weights are pulled at the start, and in asynchronous modes before evaluations
    and snapshots: see `refresh`.

    Args:
        job: the job as this rank knows it.
        arrival: this worker's place in a job that it has joined; None: it is there from the start.
        in_step: the answer to a step's push is the newest weights, the same for all workers.

    Attributes:
        step: this worker's step, from 1; 0 before the first one.
    """

    group: ServerGroup

    def __init__(self, job: Job, arrival: Arrival | None = None, in_step: bool = False) -> None:
        self.in_step = in_step and not job.config.backup
        self.config = job.config
        self.world = job.world
        self.timeout = job.config.timeout
        self.arrival = arrival
        self.backend = job.config.wire
        if arrival:
            self.store = arrival.store
            self.wire = arrival.wire
        else:
            self.store = job.meet()
            self.wire = start(job.world, self.store, self.timeout, kind=self.backend)
        self.shared = SharedMemory()
        self.servers_return = servers_return(job.config)
        if self.servers_return:
            self.wire.returned = self.shared.replace_receiver
            self.wire.returning = frozenset(range(self.world.servers))
        else:
            self.wire.end_when_silent(self.world, self.store, self.timeout)
        self.wire.asked_to_leave = note_servers_request
        for server in range(self.world.servers):
            self.wire.watch(server, self.timeout, partial(self._server_ended, server))
        self.shared.join(job.world, self.store, self.timeout)
        self.group = ServerGroup(
            self.wire, job.world, self.store, self.timeout, self.servers_return
        )
        self.waits_for_layers = job.waits_for_layers
        # The optimizer's options, where servers do not have them from their own configuration.
        self._optimizer: dict[str, Any] | None = None
        self.step = 0
        self._idle_calls = 0
        self._shares: deque[int] = deque()  # the leased shares that were not begun yet
        self._lease_range: tuple[int, int] | None = None  # the round's first share, and its end
        self._requests: SimpleQueue[Any] = SimpleQueue()  # futures of the next shares
        self._requested = False  # whether this step has requested the next share

    def prepare(self, model: nn.Module) -> nn.Module:
        parameters = trained(model)
        self.carry([p.numel() for p in parameters], flatten_weights(model))
        # The last parameter's gradient is one of the first that backward computes.
        parameters[-1].register_post_accumulate_grad_hook(lambda parameter: self.request_share())
        self.exchange.attach(model, self.waits_for_layers)
        return model

    def carry(self, sizes: Sequence[int], weights: torch.Tensor) -> Sequence[BucketRange]:
        used = with_used_buckets(self.config, self.world.workers)
        buckets = cut(
            sizes,
            self.world.servers,
            used.bucket_elements,
            self.config.fragments,
            borders=self.borders,
        )
        self.exchange = PushExchange(
            self.wire,
            self.world.member,
            self.world.workers,
            buckets,
            sizes,
            weights,
            self.config.compression,
            staged=weights.is_cuda,
            shared=self.shared,
            pushes_again=self.servers_return,
            patience=TOLD_AFTER * self.timeout,
            tell=self._tell,
        )
        for server, why in [*self.wire.lost.items()]:
            self._server_ended(server, why)
        if trace.is_on:
            push_trace = PushTrace(self.world.workers)
            self.exchange.on_sent = push_trace.sent
            self.exchange.on_answered = push_trace.answered
        if self.arrival:
            self.group.sums = self.arrival.sums
            self.step = self.arrival.step
            self.exchange.pull()
        else:
            self._install(buckets, weights)
        return buckets

    def exchange_for(self, config: RunConfig, borders: Sequence[int]) -> None:
        super().exchange_for(config, borders)
        self._optimizer = {name: getattr(config, name) for name in OPTIONS}

    def _install(self, buckets: Sequence[BucketRange], weights: torch.Tensor) -> None:
        """Gives the servers the first worker's weights, which all workers then pull."""
        if self.world.is_chief:
            for bucket in buckets:
                part = weights[bucket.start : bucket.stop].cpu()
                self.wire.ask(bucket.server, "install", bucket.number, part, self._optimizer)
            self.store.set(INSTALLED, "")
        wait_for_ranks(self.store, {self.world.servers: INSTALLED}, self.timeout)
        self._take_newest()

    def _tell(self, line: str) -> None:
        if self.group.leads:
            tell(line)

    def _server_ended(self, server: int, why: str) -> None:
        if not why:
            return
        if self.servers_return:
            self.wire.returning -= {server}
        if hasattr(self, "exchange"):
            self.exchange.fail(Failure(f"parameter server rank {server} failed: {why}"))

    def restore(
        self, step: int, state: Mapping[str, torch.Tensor], own: OwnState = NO_STATE
    ) -> None:
        self.step = step
        if own.is_own and LEFT_OUT in own.tensors:
            left_out = own.tensors[LEFT_OUT]
            for lane in self.exchange.lanes:
                lane.restore_left_out(left_out[lane.bucket.start : lane.bucket.stop])
        if self.world.is_chief:
            restore = partial(self._restore_bucket, step, state)
            for _ in self.exchange.ask_each(restore):
                pass
        self.group.barrier()  # nobody pushes before every server is ready

    def _restore_bucket(
        self, step: int, state: Mapping[str, torch.Tensor], bucket: BucketRange
    ) -> "Future[None]":
        """Gives a server its part of the optimizer's state."""
        part = {}
        for name, tensor in state.items():
            values = tensor if name == COUNT else tensor[bucket.start : bucket.stop]
            part[name] = values.clone()  # of a part of a larger tensor, rpc would send the whole
        return self.wire.call(bucket.server, "restore", bucket.number, step, part)

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        if self.group.leads:
            for lane, state in self.exchange.ask_each(self._ask_for_optimizer_state):
                yield lane.bucket.start, state

    def _ask_for_optimizer_state(self, bucket: BucketRange) -> "Future[dict[str, torch.Tensor]]":
        return self.wire.call(bucket.server, "optimizer_state", bucket.number)

    def own_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        for lane in self.exchange.lanes:
            if lane.compressor and lane.compressor.error is not None:
                yield lane.bucket.start, {LEFT_OUT: lane.compressor.error}

    def set_accumulating(self, accumulating: bool) -> None:
        self.exchange.bucketer.accumulating = accumulating

    def begin(self, step: int, lr: float) -> None:
        self.begin_carrying(lr, len(self.exchange.lanes), is_new_step=True)
        if not self.waits_for_layers:
            self.exchange.wait_for_all()

    def begin_carrying(self, lr: StepSettings, buckets: int, is_new_step: bool) -> None:
        share = None
        if is_new_step:
            self.step += 1
            share = self._shares.popleft() if self._shares else None
        self._requested = not buckets  # the next share is requested in a step that pushes
        self.exchange.begin_step(self.step, lr, share, buckets)

    def wait(self) -> None:
        """Checks, after backward, that all gradients are on their way.

        Weights are waited for where they are needed, in the next forward.
        """
        self.exchange.end_backward()
        self.request_share()

    def send(self, values: Mapping[int, torch.Tensor]) -> None:
        for number, of_bucket in values.items():
            self.exchange.send(number, of_bucket)

    def wait_for(self, numbers: Sequence[int]) -> None:
        self.exchange.wait_for(numbers)

    def skip_if_overtaken(self, step: int) -> bool:
        """Returns whether this step came to its end while the worker was at an earlier one."""
        if step > self.exchange.last_closed_step():
            return False
        self.step = step
        return True

    def begin_shares(self, begin: int, end: int) -> None:
        self._lease_range = (begin, end)
        self._requested = False
        self.request_share()

    def next_share(self) -> tuple[int | None, int]:
        # Another thread calls this than the one that requests shares: hence the queue.
        assert self._lease_range is not None
        share = self.wire.result(0, self._requests.get())
        step = self.step + 1  # the main thread has begun the step that made the request
        after = 0
        if share is None:
            # Another worker's share may come back, and must not wait for this worker.
            self.idle(at_barrier=False)
            self.exchange.wait_until_answered()
            share, after = self.wire.ask(0, "await_lease", self.world.member, step)
        if share is None:
            self._lease_range = None
            return None, after
        return share, after

    def take_share(self, number: int, steps: int) -> None:
        self._shares.append(number)

    def open_for_joining(self, state: dict[str, Any]) -> None:
        self.wire.ask(0, "open_for_joining", self.group.sums, state | {"step": self.step})

    def leave_alone(self) -> None:
        self.exchange.wait_until_answered()
        for server in reversed(range(self.world.servers)):
            self.wire.ask(server, "depart", self.world.member, self.step)
        self.wire.leave_now()

    def pause_leases(self) -> None:
        self.wire.ask(0, "pause_leases")

    def request_share(self) -> None:
        if self._lease_range and not self._requested:
            self._requested = True
            step = self.step + 1
            lease = self.wire.call(0, "lease", self.world.member, step, *self._lease_range)
            self._requests.put(lease)

    def refresh(self) -> None:
        if self.in_step:
            self.exchange.wait_for_all()
        else:
            self._take_newest()

    def _take_newest(self) -> None:
        self.idle()
        self.exchange.wait_for_all()
        self.group.barrier()  # no worker pushes any more: all pull the same weights
        self.exchange.pull()

    def idle(self, at_barrier: bool = True) -> None:
        """Tells the servers that this worker pushes nothing for now: see Bucket.idle."""
        self._idle_calls += 1
        for server in range(self.world.servers):
            call = self._idle_calls
            self.wire.ask(server, "idle", self.world.member, self.step, at_barrier, call)

    @property
    def push_status(self) -> PushStatus | None:
        status: PushStatus = self.exchange.context.status
        return status if status.buckets else None

    @property
    def waits(self) -> Sequence[Stretch]:
        return self.exchange.waits

    def traffic(self, steps: int) -> tuple[int, int]:
        lanes = self.exchange.lanes
        sent = sum(lane.bytes_sent for lane in lanes)
        received = sum(lane.bytes_received for lane in lanes)
        return sent, received

    def ask_servers(self, question: str) -> list[Any]:
        return [self.wire.ask(server, question) for server in range(self.world.servers)]
