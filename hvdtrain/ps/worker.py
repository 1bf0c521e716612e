"""A worker's end of the parameter server: what a synchroniser does, with gradients pushed and weights pulled."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from hvdtrain.buckets.local_steps import LocalSteps, LocalSynchroniser
from hvdtrain.buckets.partition import Piece, cut
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.join_info import servers_return
from hvdtrain.coordination.joining import Arrival
from hvdtrain.coordination.server_group import ServerGroup
from hvdtrain.errors import Failure
from hvdtrain.numerics.flat import flatten_weights, trained
from hvdtrain.numerics.optimizers import COUNT
from hvdtrain.ps.exchange import PushExchange
from hvdtrain.ps.push_trace import PushTrace
from hvdtrain.system import trace
from hvdtrain.wire.messages import PushStatus
from hvdtrain.wire.shared import SharedMemory
from hvdtrain.wire.wire import start

INSTALLED = "installed"  # in the store, once every server has its weights


class PushPull(LocalSynchroniser):
    """Pushes gradients to the servers while backward goes on, and takes weights back until forward needs them, layer by
    layer: there is nothing to wait for between the two. The optimizer runs on the servers.

    Args:
        in_step: the answer to a step's push is the newest weights, the same for all workers.
    """

    group: ServerGroup

    def __init__(self, job: Job, arrival: Arrival | None = None, in_step: bool = False) -> None:
        self.in_step = in_step and not job.config.backup
        self.config, self.world, self.timeout, self.arrival = job.config, job.world, job.config.timeout, arrival
        self.backend = job.config.wire
        self.store = arrival.store if arrival else job.meet()
        self.wire = arrival.wire if arrival else start(job.world, self.store, self.timeout, kind=self.backend)
        self.shared = SharedMemory()
        self.shared.join(job.world, self.store, self.timeout)
        self.servers_return = servers_return(job.config)
        if self.servers_return:
            self.wire.returned = self.shared.replace_receiver
            self.wire.returning = frozenset(range(self.world.servers))
        self.group = ServerGroup(self.wire, job.world, self.store, self.timeout, self.servers_return)
        self.waits_for_layers = job.waits_for_layers and not job.config.local_steps
        self.outer_lr, _ = self.config.taken_outer(self.world.workers)
        self.step = 0  # of this worker's
        self._idled = 0  # calls of idle
        # Of those that are leased, and not begun: its number, and of how many steps its push is.
        self._shares: deque[tuple[int, int]] = deque()
        self._lease_range: tuple[int, int] | None = None  # of shares that are leased: its begin and end
        self._share: int | None = None  # of this round of local steps
        self._requests: SimpleQueue[Any] = SimpleQueue()  # the answer to the request for the next share
        self._requested = False  # in this step

    def prepare(self, model: nn.Module) -> nn.Module:
        parameters = trained(model)
        sizes = [p.numel() for p in parameters]
        pieces = cut(sizes, self.world.servers, self.config.bucket_elements, self.config.fragments)
        weights = flatten_weights(model)
        if self.config.local_steps:
            self.local = LocalSteps(self.config, model, weights, pieces)
            weights = self.local.outer
        self.exchange = PushExchange(
            self.wire, self.world.member, self.world.workers, pieces, sizes, weights, self.config.compression,
            staged=weights.is_cuda, shared=self.shared, pushes_again=self.servers_return,
        )  # fmt: skip
        if trace.is_on:
            told = PushTrace(self.world.workers)
            self.exchange.on_sent, self.exchange.on_answered = told.sent, told.answered
            self.exchange.on_waited = told.waited
        for server in range(self.world.servers):
            self.wire.watch(server, self.timeout, partial(self._server_ended, server))
        if self.arrival:
            self.group.sums, self.step = self.arrival.sums, self.arrival.step
            self.exchange.pull()
        else:
            self._install(pieces, weights)
        # Amid backward, of which the last parameter is one of the first.
        parameters[-1].register_post_accumulate_grad_hook(lambda parameter: self._request_share())
        if self.local:
            self.local.begin_round()
        else:
            self.exchange.attach(model, self.waits_for_layers)
        return model

    def _install(self, pieces: Sequence[Piece], weights: torch.Tensor) -> None:
        """Give the servers the first worker's weights, which all then take."""
        if self.world.is_chief:
            for piece in pieces:
                self.wire.ask(piece.server, "install", piece.number, weights[piece.start : piece.stop].cpu())
            self.store.set(INSTALLED, "")
        self.store.wait([INSTALLED], timedelta(seconds=self.timeout))
        self._take_newest()

    def _server_ended(self, server: int, why: str) -> None:
        if why:
            if self.servers_return:
                self.wire.returning -= {server}
            self.exchange.fail(Failure(f"parameter server rank {server} failed: {why}"))

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        self.step = step
        if self.local:
            state = self.local.restore(step if self.in_step else 0, state, self.world.worker)
        if self.world.is_chief:

            def send(piece: Piece) -> Any:
                # Copies, since of parts of larger tensors rpc would send the whole.
                part = {n: v.clone() if n == COUNT else v[piece.start : piece.stop].clone() for n, v in state.items()}
                return self.wire.call(piece.server, "restore", piece.number, step, part)

            for _ in self.exchange.ask_each(send):
                pass
        self.group.barrier()  # nobody pushes before every server is ready

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        if self.group.leads:
            for lane, state in self.exchange.ask_each(lambda p: self.wire.call(p.server, "optimizer_state", p.number)):
                yield lane.piece.start, state
        if self.local:
            yield from self.local.parts(self.group)

    def set_accumulating(self, accumulating: bool) -> None:
        self.exchange.bucketer.accumulating = accumulating

    def begin(self, step: int, lr: float) -> None:
        if self.local:
            self._begin_local(self.local, lr)
            return
        self.step, self._requested = self.step + 1, False
        share, _ = self._shares.popleft() if self._shares else (None, 1)
        self.exchange.begin_step(self.step, lr, share)
        if not self.waits_for_layers:
            self.exchange.wait_for_all()

    def _begin_local(self, local: LocalSteps, lr: float) -> None:
        """Begin a step of a round. Where shares are leased a round is one of this worker's steps for the servers, and
        requests the next share in its last backward pass.
        """
        local.begin_step()
        if self.in_step or not local.taken:
            self.step += 1
        if self._shares and not local.taken:
            self._share, local.steps = self._shares.popleft()
        leaving = local.leaving(local.taken + 1)
        self._requested = not leaving
        self.exchange.begin_step(self.step, self.outer_lr, self._share, len(leaving))
        if local.due:
            self.exchange.wait_for(local.due)
        local.begin(lr)

    def update(self) -> None:
        if self.local:
            for number in self.local.step():
                self.exchange.send(number, self.local.difference(number))

    @property
    def ended_round(self) -> bool:
        return self.in_step and super().ended_round

    def skip_if_overtaken(self, step: int) -> bool:
        """As in Synchroniser: this step came to its end without this worker while it was at an earlier one."""
        if step > self.exchange.last_closed_step():
            return False
        self.step = step
        return True

    def begin_shares(self, begin: int, end: int) -> None:
        """Lease shares from `begin` to `end`, the last one excluded, which all workers say together. From now on each
        backward pass requests the next one, so that its answer is there when the step is over.
        """
        self._lease_range, self._requested = (begin, end), False
        self._request_share()

    def next_share(self) -> tuple[int | None, int]:
        """The number of the share to train on next; None when all of the round are finished, and the number of the
        first that was not leased.

        Called by the thread that makes the next batch, while the main thread trains on this one: hence the queue.
        """
        assert self._lease_range is not None
        share = self.wire.result(0, self._requests.get())
        step, after = self.step + 1, 0  # main has begun the step in whose backward pass it was requested
        if share is None:
            self.idle(at_barrier=False)  # another's share may come back, and it must not wait for this worker
            self.exchange.wait_until_answered()
            share, after = self.wire.result(0, self.wire.call(0, "await_lease", self.world.member, step))
        if share is None:
            self._lease_range = None
            return None, after
        return share, after

    def take_share(self, number: int, steps: int) -> None:
        """The next step begins with this share, which is of so many steps."""
        self._shares.append((number, steps))

    def open_for_joining(self, state: dict[str, Any]) -> None:
        """Before begin_shares, the worker that leads: from now on others can join, and find this state."""
        leased = {"step": self.step, "batch_size": state["batch_size"] * (self.local.every if self.local else 1)}
        self.wire.ask(0, "open_for_joining", self.group.sums, state | leased)

    def leave_alone(self) -> None:
        """Leave, between two steps, alone: the others go on."""
        self.exchange.wait_until_answered()
        pushed = self.step - bool(self.local and self.local.taken and not self.local.is_over)
        for server in reversed(range(self.world.servers)):
            self.wire.ask(server, "depart", self.world.member, pushed)
        self.wire.leave_now()

    def pause_leases(self) -> None:
        """End the round early, for all workers."""
        self.wire.ask(0, "pause_leases")

    def _request_share(self) -> None:
        if self._lease_range and not self._requested:
            self._requested = True
            step = self.step + 1
            self._requests.put(self.wire.call(0, "lease", self.world.member, step, *self._lease_range))

    def refresh(self) -> None:
        if self.in_step:
            self.exchange.wait_for_all()
        else:
            self._take_newest()
        if self.local:
            self.local.show_outer()

    def _take_newest(self) -> None:
        self.idle()
        self.exchange.wait_for_all()
        self.group.barrier()  # no worker pushes any more: all pull the same weights
        self.exchange.pull()

    def idle(self, at_barrier: bool = True) -> None:
        self._idled += 1
        for server in range(self.world.servers):
            self.wire.ask(server, "idle", self.world.member, self.step, at_barrier, self._idled)

    @property
    def push_status(self) -> PushStatus | None:
        status: PushStatus = self.exchange.context.status
        return status if status.buckets else None

    @property
    def waited_s(self) -> float:
        return self.exchange.waited_s

    def traffic(self, steps: int) -> tuple[int, int]:
        lanes = self.exchange.lanes
        return sum(lane.bytes_sent for lane in lanes), sum(lane.bytes_received for lane in lanes)

    def ask_servers(self, question: str) -> list[Any]:
        return [self.wire.ask(server, question) for server in range(self.world.servers)]
