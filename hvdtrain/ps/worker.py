"""A worker's end of the parameter server: what a synchroniser does, with gradients pushed and weights pulled."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from hvdtrain.errors import Failure
from hvdtrain.numerics.flat import flatten_weights, trained
from hvdtrain.numerics.optimizers import COUNT
from hvdtrain.numerics.precision import LossScale
from hvdtrain.ps import wire
from hvdtrain.ps.exchange import Exchange
from hvdtrain.ps.group import ServerGroup
from hvdtrain.ps.join_info import servers_return
from hvdtrain.ps.joining import Arrival
from hvdtrain.ps.messages import PushStatus
from hvdtrain.ps.partition import Piece, cut
from hvdtrain.ps.shared import SharedMemory
from hvdtrain.world.job import Job

INSTALLED = "installed"  # in the store, once every server has its weights
AT_ONCE = 8  # buckets of which the optimizer's state is asked for at once


class PushPull:
    """Pushes gradients to the servers while backward goes on, and takes weights back until forward needs them."""

    def __init__(self, job: Job, arrival: Arrival | None = None) -> None:
        self.config, self.world, self.timeout, self.arrival = job.config, job.world, job.config.timeout, arrival
        self.backend = job.config.wire
        self.store = arrival.store if arrival else job.meet()
        self.accumulating = False
        if not arrival:
            wire.start(job.world, self.store, self.timeout, kind=self.backend)
        self.shared = SharedMemory()
        self.shared.join(job.world, self.store, self.timeout)
        self.servers_return = servers_return(job.config)
        if self.servers_return:
            wire.wait_for_return(range(self.world.servers), self.shared.succeed)
        self.group = ServerGroup(job.world, self.store, self.timeout, self.servers_return)
        self._idled = 0  # calls of idle
        self._shares: deque[int] = deque()  # numbers of those that are leased, and not begun
        self._restored = 0  # the step of the snapshot that training goes on from
        self._lease_range: tuple[int, int] | None = None  # of shares that are leased: its begin and end
        self._requests: SimpleQueue[Any] = SimpleQueue()  # the answer to the request for the next share
        self._requested = False  # in this step

    def prepare(self, model: nn.Module) -> nn.Module:
        self.parameters = parameters = trained(model)
        sizes = [p.numel() for p in parameters]
        pieces = cut(sizes, self.world.servers, self.config.bucket_elements)
        weights = flatten_weights(model)
        self.exchange = Exchange(
            self.world.member, self.world.workers, pieces, sizes, weights, self.config.compression,
            wire.PATIENCE * self.timeout, staged=weights.is_cuda, shared=self.shared, pushes_again=self.servers_return,
        )  # fmt: skip
        for server in range(self.world.servers):
            wire.watch(server, self.timeout, partial(self._server_ended, server))
        if self.arrival:
            self.group.sums, self.exchange.step = self.arrival.sums, self.arrival.step
            self.exchange.pull()
        else:
            self._install(pieces, weights)
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._push, index))
        numbers = {p: index for index, p in enumerate(parameters)}
        for module in model.modules() if not self.config.compile else ():
            if own := [numbers[p] for p in module.parameters(recurse=False) if p in numbers]:
                module.register_forward_pre_hook(lambda module, inputs, own=own: self.exchange.wait_for(own))
        return model

    def _install(self, pieces: Sequence[Piece], weights: torch.Tensor) -> None:
        """Give the servers the first worker's weights, which all then take."""
        if self.world.is_chief:
            for piece in pieces:
                wire.ask(piece.server, "install", piece.number, weights[piece.start : piece.stop].cpu())
            self.store.set(INSTALLED, "")
        self.store.wait([INSTALLED], timedelta(seconds=self.timeout))
        self.refresh()

    def _server_ended(self, server: int, why: str) -> None:
        if why:
            if self.servers_return:
                wire.give_up_on(server)
            self.exchange.fail(Failure(f"parameter server rank {server} failed: {why}"))

    def _push(self, index: int, parameter: nn.Parameter) -> None:
        """A gradient is complete, and the weights it belongs to are not needed any more in this backward pass."""
        self._request_share()
        if self.accumulating or self.config.precision == "fp16":  # which may have overflowed: known after backward
            return
        assert parameter.grad is not None
        self.exchange.put(index, parameter.grad)
        parameter.grad = None

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        self.exchange.step = self._restored = step
        if self.world.is_chief:

            def send(piece: Piece) -> Any:
                # Copies, since of parts of larger tensors rpc would send the whole.
                own = {n: v.clone() if n == COUNT else v[piece.start : piece.stop].clone() for n, v in state.items()}
                return wire.call(piece.server, "restore", piece.number, step, own)

            for _ in self._asked(send):
                pass
        self.group.barrier()  # nobody pushes before every server is ready

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        if self.group.leads:
            yield from self._asked(lambda piece: wire.call(piece.server, "optimizer_state", piece.number))

    def _asked(self, call: Callable[[Piece], Any]) -> Iterator[tuple[int, Any]]:
        """Where each bucket begins, and the answer to a call about it. A few are under way at a time: the optimizer's
        state of all may be too much for one process.
        """
        pieces = self.exchange.pieces
        for first in range(0, len(pieces), AT_ONCE):
            for piece, answer in [(piece, call(piece)) for piece in pieces[first : first + AT_ONCE]]:
                yield piece.start, wire.result(piece.server, answer)

    def set_accumulating(self, accumulating: bool) -> None:
        self.accumulating = accumulating

    def begin(self, step: int, lr: float) -> None:
        self._requested = False
        self.exchange.begin(self.exchange.step + 1, lr, self._shares.popleft() if self._shares else None)
        if self.config.compile:  # a compiled model has no layers to wait before
            self.exchange.wait_for_all()

    def skip_if_overtaken(self, step: int) -> bool:
        """As in Synchroniser: this step came to its end without this worker while it was at an earlier one."""
        if step > self.exchange.over():
            return False
        self.exchange.step = step
        return True

    def wait(self) -> None:
        """Nothing to wait for: forward waits for each layer's weights when it needs them. Where no gradient was pushed
        in backward (fp16), the next share is requested here.
        """
        self._request_share()

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
        share = wire.result(0, self._requests.get())
        step, after = self.exchange.step + 1, 0  # main has begun the step in whose backward pass it was requested
        if share is None:
            self.idle(at_barrier=False)  # another's share may come back, and it must not wait for this worker
            self.exchange.wait_until_answered()
            share, after = wire.result(0, wire.call(0, "await_lease", self.world.member, step))
        if share is None:
            self._lease_range = None
            return None, after
        self._shares.append(share)
        return share, after

    def open_for_joining(self, state: dict[str, Any]) -> None:
        """Before begin_shares, the worker that leads: from now on others can join, and find this state."""
        wire.ask(0, "open_for_joining", self.group.sums, state | {"step": self.exchange.step})

    def depart(self) -> None:
        """Leave, between two steps, alone: the others go on."""
        self.exchange.wait_until_answered()
        for server in reversed(range(self.world.servers)):
            wire.ask(server, "depart", self.world.member, self.exchange.step)
        wire.hang_up()

    def pause_leases(self) -> None:
        """End the round early, for all workers."""
        wire.ask(0, "pause_leases")

    def _request_share(self) -> None:
        if self._lease_range and not self._requested:
            self._requested = True
            step = self.exchange.step + 1
            self._requests.put(wire.call(0, "lease", self.world.member, step, *self._lease_range))

    def update(self, loss_scale: LossScale) -> None:
        """Nothing, since the optimizer runs on the servers. With fp16: push all gradients, unless one overflowed."""
        if loss_scale.enabled:
            loss_scale.step(self._push_all)
            if not loss_scale.acted:
                self.exchange.skip()

    def _push_all(self) -> None:
        for index, parameter in enumerate(self.parameters):
            assert parameter.grad is not None
            self.exchange.put(index, parameter.grad)

    def refresh(self) -> None:
        self.idle()
        self.exchange.wait_for_all()
        self.group.barrier()  # no worker pushes any more: all pull the same weights
        self.exchange.pull()

    def idle(self, at_barrier: bool = True) -> None:
        self._idled += 1
        for server in range(self.world.servers):
            wire.ask(server, "idle", self.world.member, self.exchange.step, at_barrier, self._idled)

    @property
    def push_status(self) -> PushStatus:
        return self.exchange.push_status

    @property
    def waited_s(self) -> float:
        return self.exchange.waited_s

    def traffic(self, steps: int) -> tuple[int, int]:
        return self.exchange.bytes_sent, self.exchange.bytes_received

    def ask_servers(self, question: str) -> list[Any]:
        return [wire.ask(server, question) for server in range(self.world.servers)]
