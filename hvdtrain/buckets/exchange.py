"""Buckets of gradients on their way, for servers and for rings: out as backward computes them, and fresh weights in
before forward needs them.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import nn
from torch.futures import Future

from hvdtrain.buckets.partition import Piece
from hvdtrain.buckets.staging import Staging
from hvdtrain.errors import Failure
from hvdtrain.numerics.clock import Stopwatch
from hvdtrain.numerics.flat import trained


class Bucketer:
    """Hands over each bucket when its last gradient is there: they may come in any order.

    Args:
        sizes: elements of each parameter.
        pieces: the buckets.
        complete: called with a bucket's number and gradient, [bucket] float32, by the thread that has put the last part
            of it. With `staging` the gradient is on its way there: see Staging.when_out.
        staging: what copies gradients off a GPU.
        device: where gradients come together, without staging; by default the CPU.

    Attributes:
        of_parameter: the numbers of the buckets that each parameter lies in.
        accumulating: another backward pass of the same step follows: no gradient is complete after this one.
    """

    def __init__(
        self, sizes: Sequence[int], pieces: Sequence[Piece], complete: Callable[[int, torch.Tensor], None],
        staging: Staging | None = None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.pieces, self.complete, self.staging, self.accumulating = pieces, complete, staging, False
        starts = list(accumulate(sizes, initial=0))
        # Of each parameter: the buckets that it lies in, where it lies there, and which range of it, laid flat, does.
        self._parts: list[list[tuple[int, slice, slice]]] = [[] for _ in sizes]
        for number, piece in enumerate(pieces):
            for parameter in piece.parameters:
                start, stop = max(piece.start, starts[parameter]), min(piece.stop, starts[parameter + 1])
                place, part = (slice(start - zero, stop - zero) for zero in (piece.start, starts[parameter]))
                self._parts[parameter].append((number, place, part))
        self.of_parameter = [[number for number, _, _ in parts] for parts in self._parts]
        # Where the gradients of several parameters come together; others leave as they are.
        self._gathered = {
            number: torch.empty(piece.stop - piece.start, device=device)
            for number, piece in enumerate(pieces)
            if len(piece.parameters) > 1 and not staging
        }
        self._missing = [len(piece.parameters) for piece in pieces]

    def incomplete(self) -> list[int]:
        """The buckets that have a part of their gradient."""
        return [n for n, piece in enumerate(self.pieces) if self._missing[n] < len(piece.parameters)]

    def put(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient, which nobody else may change any more."""
        flat = gradient.reshape(-1)
        for number, place, part in self._parts[parameter]:
            bucket = flat[part]
            if self.staging:
                self.staging.copy_out(number, place.start, bucket)
                bucket = self.staging.gradients[number]
            elif number in self._gathered:
                self._gathered[number][place].copy_(bucket)
                bucket = self._gathered[number]
            self._missing[number] -= 1
            if not self._missing[number]:
                self._missing[number] = len(self.pieces[number].parameters)
                self.complete(number, bucket)


class Lane(ABC):
    """A bucket's way out and back. It has one gradient under way: none follows before fresh weights.

    Attributes:
        number: of the bucket, in the order in which forward needs them.
        weights: [bucket] float32, the model's own memory.
        size: bytes of its gradient.
        gradient, context: what waits to be sent, [bucket] float32, and of which step that is: see Exchange.begin.
        is_fresh: nothing that was sent is unanswered.
        sent_at: when what is under way was sent, or was last, by time.perf_counter.
    """

    context: Any

    def __init__(self, number: int, piece: Piece, weights: torch.Tensor, staging: Staging | None) -> None:
        self.number, self.piece, self.staging = number, piece, staging
        self.gradient: torch.Tensor | None = None
        self.weights = weights[piece.start : piece.stop]
        self.size = self.weights.nbytes
        self.is_fresh = True
        self.sent_at = 0.0

    @abstractmethod
    def send(self, gradient: torch.Tensor) -> "Future[Any]":
        """Send the gradient, which may be used up; what comes back."""

    @abstractmethod
    def take(self, answer: Any) -> None:
        """Have the weights that the answer makes."""

    def write(self, weights: torch.Tensor) -> None:
        """Have these weights, [bucket], in the model."""
        if self.staging:
            self.staging.copy_in(self.number, weights)
        else:
            self.weights.copy_(weights)

    def failure(self, error: Exception) -> Exception:
        """What is raised where this bucket is waited for, when that happened to what is under way."""
        return error


class Exchange:
    """Sends each bucket when its last gradient is there; of those that wait, what forward needs first goes first.

    A bucket may come back only when other workers have sent the same one. So that workers do not wait for each other in
    a circle, one bucket beyond the limit may always be under way to each server: the one that was ready first. That
    order is the same on all workers, so the slowest one is always answered. (A ring has one server in this sense.)

    Args:
        lanes: of the buckets, in the order of the flat vector: the order in which forward needs them.
        sizes: elements of each parameter.
        weights: [parameters] float32, the model's own memory.
        staging: what copies gradients off a GPU to CPU memory, where they are sent from there.
        room: bytes of gradients under way at once, for each server. Enough to fill a link while answers travel back;
            little enough that a bucket that forward needs soon, ready late, does not queue behind all others (Jayarajan
            et al., 2019, arXiv:1905.03960).
        patience: the longest wait, in seconds.

    Attributes:
        bucketer: takes the gradients.
        context: of the step whose gradients come next.
        on_sent, on_answered, on_waited: told of buckets and of waits, for --trace; see ps.push_trace.
    """

    def __init__(
        self, lanes: Sequence[Any], sizes: Sequence[int], weights: torch.Tensor, staging: Staging | None, room: int,
        patience: float,
    ) -> None:  # fmt: skip
        pieces = [lane.piece for lane in lanes]
        self.lanes, self.room, self.patience, self._staging = lanes, room, patience, staging
        self.bucketer = Bucketer(sizes, pieces, self._complete, staging, weights.device)
        self.context: Any = None
        self.on_sent: Callable[[Any, int], None] = lambda lane, under_way: None
        self.on_answered: Callable[[Any, float, int], None] = lambda lane, came, under_way: None
        self.on_waited: Callable[[Any, Any], None] = lambda began, ended: None
        self._stopwatch = Stopwatch(weights.device)
        self._waits: list[tuple[Any, Any]] = []  # when each wait of this step began and ended
        self._changed = threading.Condition()  # guards all below, and lanes' freshness: other threads change them
        servers = {piece.server for piece in pieces}
        self._waiting: dict[int, list[int]] = {server: [] for server in servers}  # buckets, as they became ready
        self._under_way = dict.fromkeys(servers, 0)  # bytes
        self._over_limit: dict[int, int] = {}  # server -> its bucket that is under way though there was no room
        self._error: BaseException | None = None
        self._beginnings = 0  # see begin_again

    def attach(self, model: nn.Module, by_layer: bool) -> None:
        """Take each backward's gradients of the model's parameters, which are left without.

        Args:
            by_layer: each layer's forward waits for the layer's weights.
        """
        parameters = trained(model)

        def take(index: int, parameter: nn.Parameter) -> None:
            if not self.bucketer.accumulating:
                assert parameter.grad is not None
                self.bucketer.put(index, parameter.grad)
                parameter.grad = None

        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(take, index))
        numbers = dict(zip(parameters, self.bucketer.of_parameter, strict=True))
        for module in model.modules() if by_layer else ():
            if needed := sorted({n for p in module.parameters(recurse=False) for n in numbers.get(p, ())}):
                module.register_forward_pre_hook(lambda module, inputs, needed=needed: self.wait_for(needed))

    def send(self, number: int, values: torch.Tensor) -> None:
        """Send what there is for a bucket, [bucket] float32, where no backward brings it."""
        if self._staging:
            self._staging.copy_out(number, 0, values)
            values = self._staging.gradients[number]
        self._complete(number, values)

    def begin(self, context: Any) -> None:
        """The step whose gradients come next."""
        self.context, self._waits = context, []

    @property
    def waited_s(self) -> float:
        """Seconds that wait_for took since the current step began; on a GPU, of waits that are over there."""
        return sum(self._stopwatch.seconds(began, ended) for began, ended in self._waits)

    def wait_for(self, numbers: Sequence[int]) -> None:
        """Return when these buckets' weights are as the answers to what was sent last make them.

        Raises:
            Failure: what carries them failed, or nothing came in time.
        """
        began = self._stopwatch.now()
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._error or all(self.lanes[number].is_fresh for number in numbers), self.patience
            )
        if self._staging:
            self._staging.wait_for(numbers)
        ended = self._stopwatch.now()
        self._waits.append((began, ended))
        self.on_waited(began, ended)
        if self._error or not came:
            self.give_up()

    def wait_for_all(self) -> None:
        """wait_for every bucket."""
        self.wait_for(range(len(self.lanes)))

    def fail(self, problem: BaseException) -> None:
        """Have this raised where the worker waits, or will."""
        with self._changed:
            self._error = self._error or problem
            self._changed.notify_all()

    def begin_again(self) -> None:
        """Forget what is under way, and what went wrong: no answer to it counts any more. Backward is over."""
        with self._changed:
            self._beginnings += 1
            self._error = None
            self._over_limit.clear()
            for server in self._under_way:
                self._waiting[server], self._under_way[server] = [], 0
            for lane in self.lanes:
                lane.gradient, lane.is_fresh = None, True

    def give_up(self) -> NoReturn:
        if self._error:
            raise Failure(str(self._error)) from self._error
        missing = [lane.number for lane in self.lanes if not lane.is_fresh]
        raise Failure(self.silence(missing))

    def silence(self, missing: Sequence[int]) -> str:
        """What is wrong, where these buckets did not come back in time."""
        return f"{self.in_words(missing)} were not averaged within {self.patience:g} s (see --timeout)"

    def in_words(self, buckets: Sequence[int]) -> str:
        return f"{len(buckets)} of {len(self.lanes)} buckets of gradients, {buckets[0]} among them,"

    def _complete(self, number: int, gradient: torch.Tensor) -> None:
        """All of a bucket's gradient is computed: its weights are old now."""
        lane = self.lanes[number]
        lane.gradient, lane.context, lane.is_fresh = gradient, self.context, False
        if self._staging:
            self._staging.when_out(partial(self._send, lane), self.fail)
        else:
            self._send(lane)

    def _send(self, ready: Lane | None = None) -> None:
        """Send this bucket and what else waits, as far as there is room."""
        if ready:
            with self._changed:
                self._waiting[ready.piece.server].append(ready.number)
        while True:
            with self._changed:
                if (number := self._next()) is None:
                    return
                lane = self.lanes[number]
                self._waiting[lane.piece.server].remove(number)
                self._under_way[lane.piece.server] += lane.size
            gradient, lane.gradient, lane.sent_at = lane.gradient, None, time.perf_counter()
            answer = lane.send(gradient)
            self.on_sent(lane, sum(self._under_way.values()))
            answer.add_done_callback(partial(self._answered, lane, self._beginnings))

    def _next(self) -> int | None:
        """The bucket to send now, if any: of those that are next for their servers, what forward needs first."""
        free, under_way = [], self._under_way
        for server, waiting in self._waiting.items():
            if waiting and (not under_way[server] or under_way[server] + self.lanes[min(waiting)].size <= self.room):
                free.append(min(waiting))
        if free:
            return min(free)
        for server, waiting in self._waiting.items():
            if waiting and server not in self._over_limit:
                self._over_limit[server] = waiting[0]
                return waiting[0]
        return None

    def _answered(self, lane: Any, beginnings: int, future: "Future[Any]") -> None:
        """What goes wrong here, in a thread of what carries buckets, is raised where the worker waits."""
        came = time.perf_counter()
        if beginnings != self._beginnings:
            return
        try:
            answer = future.value()
        except Exception as error:
            self.fail(lane.failure(error))
            return
        try:
            with self._changed:
                self._under_way[lane.piece.server] -= lane.size
                if self._over_limit.get(lane.piece.server) == lane.number:
                    del self._over_limit[lane.piece.server]
            self._send()
            lane.take(answer)
            self.on_answered(lane, came, sum(self._under_way.values()))
            with self._changed:
                lane.is_fresh = True
                self._changed.notify_all()
        except Exception as error:
            self.fail(error)
