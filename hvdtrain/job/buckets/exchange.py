"""Buckets of gradients on their way, to servers or around a ring.

They are sent as backward computes them, and fresh weights arrive before forward needs them.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.futures import Future

from hvdtrain.base.errors import Failure
from hvdtrain.base.formatting import in_minutes
from hvdtrain.base.numerics.clock import Stopwatch, Stretch
from hvdtrain.base.numerics.flat import trained
from hvdtrain.job.buckets.gradient_check import GradientCheck
from hvdtrain.job.buckets.partition import BucketRange
from hvdtrain.job.buckets.send_queue import SendQueue
from hvdtrain.job.buckets.staging import Staging


class Overlap(NamedTuple):
    """The part of a parameter that lies in a bucket.

    Attributes:
        bucket: the bucket's number.
        in_bucket: where in the bucket the part lies.
        in_parameter: which elements of the parameter, laid flat, it has.
    """

    bucket: int
    in_bucket: slice
    in_parameter: slice


class Bucketer:
    """Hands over each bucket when its last gradient is there. Gradients may come in any order.

    Args:
        sizes: elements of each parameter.
        buckets: the buckets.
        complete: called with a bucket's number and gradient, [bucket] float32, by the thread that
            has put the last part of it. With `staging` the gradient is still being copied: see
            Staging.when_out.
        staging: copies gradients off a GPU.
        device: where gradients are gathered, without staging; by default the CPU.

    Attributes:
        overlaps: for each parameter, its parts in the buckets.
        of_parameter: for each parameter, the numbers of the buckets that it lies in.
        accumulating: another backward pass of the same step follows: no gradient is complete after
            this one.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        buckets: Sequence[BucketRange],
        complete: Callable[[int, torch.Tensor], None],
        staging: Staging | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.buckets = buckets
        self.complete = complete
        self.staging = staging
        self.accumulating = False
        self.overlaps = _overlaps(sizes, buckets)
        self.of_parameter = [[overlap.bucket for overlap in overlaps] for overlaps in self.overlaps]
        # The memory in which gradients of several parameters are gathered. A gradient that fills a
        # bucket alone is handed over as it is.
        self._gathered = {
            number: torch.empty(bucket.elements, device=device)
            for number, bucket in enumerate(buckets)
            if len(bucket.parameters) > 1 and not staging
        }
        self._missing = [len(bucket.parameters) for bucket in buckets]
        # Of each bucket that is gathered: what came so far, and where in the bucket it goes.
        self._came: dict[int, list[torch.Tensor]] = {number: [] for number in self._gathered}
        self._places: dict[int, list[torch.Tensor]] = {number: [] for number in self._gathered}
        # Of each parameter that has come: see _place.
        self._place_of: dict[int, torch.Tensor | None] = {}

    def memory(self, number: int) -> torch.Tensor | None:
        """Returns the memory in which a bucket's gradients are gathered, [bucket] float32.

        None where one gradient, or a part of it, fills the bucket alone, and with `staging`.
        """
        return self._gathered.get(number)

    def put(self, parameter: int, gradient: torch.Tensor) -> None:
        """Takes a parameter's gradient, which nobody else may change any more."""
        place = self._place(parameter, gradient.shape)
        if place is not None:
            self._take(self.of_parameter[parameter][0], place, gradient)
            return
        flat = gradient.reshape(-1)
        for number, in_bucket, in_parameter in self.overlaps[parameter]:
            of_bucket = flat[in_parameter]
            if self.staging:
                self.staging.copy_out(number, in_bucket.start, of_bucket)
                self._count(number, self.staging.gradients[number])
            elif number in self._gathered:
                self._take(number, self._gathered[number][in_bucket], of_bucket)
            else:
                self._count(number, of_bucket)

    def _place(self, parameter: int, shape: torch.Size) -> torch.Tensor | None:
        """Returns where the gradient, which has this shape, is gathered with those of others.

        None where it lies in several buckets, or fills one alone.
        """
        if parameter not in self._place_of:
            overlaps = self.overlaps[parameter]
            place = None
            if len(overlaps) == 1 and overlaps[0].bucket in self._gathered:
                gathered = self._gathered[overlaps[0].bucket]
                place = gathered[overlaps[0].in_bucket].view(shape)
            self._place_of[parameter] = place
        return self._place_of[parameter]

    def _take(self, number: int, place: torch.Tensor, gradient: torch.Tensor) -> None:
        """Takes a part of a gathered bucket. `_count` copies all parts when the last one is there."""
        self._places[number].append(place)
        self._came[number].append(gradient)
        self._count(number, self._gathered[number])

    def _count(self, number: int, of_bucket: torch.Tensor) -> None:
        """Counts a part of a bucket that has come, and hands over the bucket with its last part."""
        self._missing[number] -= 1
        if self._missing[number]:
            return
        self._missing[number] = len(self.buckets[number].parameters)
        if number in self._gathered:
            torch._foreach_copy_(self._places[number], self._came[number])
            self._places[number].clear()
            self._came[number].clear()
        self.complete(number, of_bucket)


def _overlaps(sizes: Sequence[int], buckets: Sequence[BucketRange]) -> list[list[Overlap]]:
    """Returns, for each parameter of so many elements, its parts in the buckets."""
    starts = list(accumulate(sizes, initial=0))
    overlaps: list[list[Overlap]] = [[] for _ in sizes]
    for number, bucket in enumerate(buckets):
        for parameter in bucket.parameters:
            begin = starts[parameter]
            start = max(bucket.start, begin)
            stop = min(bucket.stop, starts[parameter + 1])
            in_bucket = slice(start - bucket.start, stop - bucket.start)
            in_parameter = slice(start - begin, stop - begin)
            overlaps[parameter].append(Overlap(number, in_bucket, in_parameter))
    return overlaps


class Lane(ABC):
    """A bucket's way out and back.

    A lane has one gradient under way: none follows before fresh weights have come.

    Args:
        number: the bucket's number.
        bucket: the bucket's range.
        weights: [parameters] float32, the model's own memory.
        staging: copies the bucket off a GPU and back.

    Attributes:
        number: the bucket's number, in the order in which forward needs the buckets.
        weights: [bucket] float32, the model's own memory.
        size: bytes of the bucket's gradient.
        gradient: the gradient that waits to be sent, [bucket] float32.
        context: the context of the gradient's step: see Exchange.begin.
        group: the number of the group of parameters that the bucket is of, where a script has
            several.
        is_fresh: whether all that was sent has been answered.
        sent_at: when the bucket was sent last, by time.perf_counter.
    """

    context: Any
    group = 0

    def __init__(
        self, number: int, bucket: BucketRange, weights: torch.Tensor, staging: Staging | None
    ) -> None:
        self.number = number
        self.bucket = bucket
        self.staging = staging
        self.gradient: torch.Tensor | None = None
        self.weights = weights[bucket.start : bucket.stop]
        self.size = self.weights.nbytes
        self.is_fresh = True
        self.sent_at = 0.0

    @abstractmethod
    def send(self, gradient: torch.Tensor) -> "Future[Any]":
        """Sends the gradient, which may be used up; returns the answer that will come."""

    @abstractmethod
    def take(self, answer: Any) -> None:
        """Writes the weights that the answer makes into the model."""

    def write(self, weights: torch.Tensor) -> None:
        """Writes these weights, [bucket], into the model."""
        if self.staging:
            self.staging.copy_in(self.number, weights)
        else:
            self.weights.copy_(weights)

    def failure(self, error: Exception) -> Exception:
        """Returns what is raised where this bucket is waited for, when sending it failed so."""
        return error


class Exchange:
    """Sends each bucket when its last gradient is there.

    Of the buckets that wait, the one that forward needs first goes first.

    A bucket may come back only when other workers have sent the same one. So that workers do not
    wait for each other in a circle, one bucket beyond the limit may always be under way to each
    server: the one that was ready first. That order is the same on all workers, so the slowest
    worker is always answered. (A ring has one server in this sense.)

    Args:
        lanes: the lanes of the buckets, in the order of the flat vector, which is the order in
            which forward needs them.
        sizes: elements of each parameter.
        weights: [parameters] float32, the model's own memory.
        staging: copies gradients off a GPU to CPU memory, from where they are sent.
        room: bytes of gradients under way at once, for each server. Enough to fill a link while
            answers travel back; little enough that a bucket that forward needs soon, ready late,
            does not queue behind all others (Jayarajan et al., 2019, arXiv:1905.03960). Infinity:
            each bucket is sent when it is ready.
        patience: seconds of a wait after which `tell` is called, again and again. The wait goes on:
            whoever knows that a rank is lost calls `fail`.
        tell: called with a line about a wait.
        changed: notified when a bucket has come; by default a condition of its own.

    Attributes:
        bucketer: takes the gradients.
        context: the context of the step whose gradients come next.
        queues: for each server, the buckets that wait to be sent to it.
        waits: when wait_for waited, since the current step began.
        on_sent: called when a bucket was sent, for --trace; see ps.push_trace.
        on_answered: called when a bucket was answered, for --trace.
    """

    def __init__(
        self,
        lanes: Sequence[Any],
        sizes: Sequence[int],
        weights: torch.Tensor,
        staging: Staging | None,
        room: float,
        patience: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
        changed: threading.Condition | None = None,
    ) -> None:
        buckets = [lane.bucket for lane in lanes]
        self.lanes = lanes
        self._staging = staging
        self.patience = patience
        self.tell = tell
        self.bucketer = Bucketer(sizes, buckets, self._complete, staging, weights.device)
        self.context: Any = None
        self.on_sent: Callable[[Any, int], None] = lambda lane, under_way: None
        self.on_answered: Callable[[Any, float, int], None] = lambda lane, came, under_way: None
        self._check: GradientCheck | None = None  # of the model whose gradients are taken
        self._stopwatch = Stopwatch(weights.device)
        self.waits: list[Stretch] = []
        # Guards all that follows, and the lanes' freshness: other threads change them.
        self._changed = changed or threading.Condition()
        self.queues = {
            bucket.server: SendQueue(room, lambda number: self.lanes[number].size)
            for bucket in buckets
        }
        self._has_room_for_all = room == float("inf")  # then no bucket waits in a queue
        self._error: BaseException | None = None
        self._beginnings = 0  # see begin_again

    def attach(self, model: nn.Module, by_layer: bool) -> None:
        """Takes the gradients of the model's parameters in each backward.

        The parameters themselves are left without gradients.

        Args:
            model: the model.
            by_layer: each layer's forward waits for the layer's weights.
        """
        parameters = trained(model)
        check = GradientCheck(model)
        self._check = check

        def take(index: int, parameter: nn.Parameter) -> None:
            if self.bucketer.accumulating:
                return
            assert parameter.grad is not None
            check.note(index)
            self.bucketer.put(index, parameter.grad)
            parameter.grad = None

        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(take, index))
        if by_layer:
            self._wait_before_layers(model, parameters)

    def _wait_before_layers(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Has each layer's forward wait for the layer's weights."""
        numbers = dict(zip(parameters, self.bucketer.of_parameter, strict=True))
        for module in model.modules():
            needed: set[int] = set()
            for parameter in module.parameters(recurse=False):
                needed.update(numbers.get(parameter, ()))
            if needed:
                wait = partial(self._wait_before_forward, sorted(needed))
                module.register_forward_pre_hook(wait)

    def _wait_before_forward(self, numbers: Sequence[int], module: nn.Module, inputs: Any) -> None:
        self.wait_for(numbers)

    def end_backward(self) -> None:
        """Checks that all gradients are on their way, after the last backward pass of each step.

        Raises:
            Failure: some parameters had none; the line names them.
        """
        if self._check:
            self._check.end_backward()

    def send(self, number: int, values: torch.Tensor) -> None:
        """Sends a bucket's values, [bucket] float32, where no backward brings them."""
        if self._staging:
            self._staging.copy_out(number, 0, values)
            values = self._staging.gradients[number]
        self._complete(number, values)

    def begin(self, context: Any) -> None:
        """Begins a step: the gradients that come next are of this context."""
        self.context = context
        self.waits = []

    def wait_for(self, numbers: Sequence[int]) -> None:
        """Blocks until the last sends of these buckets are answered, and the weights are in the model.

        Raises:
            Failure: the transport failed.
        """
        began = self._stopwatch.now()
        self._wait_until(lambda: all(self.lanes[number].is_fresh for number in numbers))
        if self._staging:
            self._staging.wait_for(numbers)
        self.waits.append((began, self._stopwatch.now()))
        self._raise_error()

    def wait_for_all(self) -> None:
        """Blocks until every bucket has fresh weights: see wait_for."""
        self.wait_for(range(len(self.lanes)))

    def fail(self, problem: BaseException) -> None:
        """Makes the current or the next wait of the worker raise this."""
        with self._changed:
            self._error = self._error or problem
            self._changed.notify_all()

    def begin_again(self) -> None:
        """Forgets what is under way, and what went wrong. Answers to it count no more.

        Called when backward is over.
        """
        with self._changed:
            self._beginnings += 1
            self._error = None
            for queue in self.queues.values():
                queue.clear()
            for lane in self.lanes:
                lane.gradient = None
                lane.is_fresh = True

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        """Blocks until `is_over` returns True, or something went wrong."""
        times = 0
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._error or is_over(), self.patience):
                    return
            times += 1
            if self.patience:
                self.tell_of_wait(times * self.patience)

    def tell_of_wait(self, seconds: float) -> None:
        """Shows the user who has been waited for, for so long."""
        missing = [lane.number for lane in self.lanes if not lane.is_fresh]
        if missing:
            self.tell(f"waiting for {self.whom(missing)}, alive, for {in_minutes(seconds)}")

    def _raise_error(self) -> None:
        if self._error:
            raise Failure(str(self._error)) from self._error

    def whom(self, missing: Sequence[int]) -> str:
        """Returns, in words, who is waited for where these buckets are missing."""
        return f"ranks that have not sent {self.in_words(missing)}"

    def in_words(self, buckets: Sequence[int]) -> str:
        return f"{len(buckets)} of {len(self.lanes)} buckets of gradients, {buckets[0]} among them"

    def _complete(self, number: int, gradient: torch.Tensor) -> None:
        """Takes a bucket whose gradient is complete. Its weights are old now."""
        lane = self.lanes[number]
        lane.gradient = gradient
        lane.context = self.context
        lane.is_fresh = False
        if self._staging:
            self._staging.when_out(partial(self._send, lane), self.fail)
        else:
            self._send(lane)

    def _send(self, ready: Lane | None = None) -> None:
        """Sends this bucket and the others that wait, as far as there is room."""
        if self._has_room_for_all:
            if ready:
                self._hand_over(ready)
            return
        if ready:
            with self._changed:
                self.queues[ready.bucket.server].add(ready.number)
        while True:
            with self._changed:
                number = self._next()
                if number is None:
                    return
                lane = self.lanes[number]
                self.queues[lane.bucket.server].send(number)
            self._hand_over(lane)

    def _hand_over(self, lane: Any) -> None:
        """Has the lane send its gradient."""
        gradient = lane.gradient
        lane.gradient = None
        lane.sent_at = time.perf_counter()
        answer = lane.send(gradient)
        self.on_sent(lane, self._bytes_under_way())
        answer.add_done_callback(partial(self._answered, lane, self._beginnings))

    def _next(self) -> int | None:
        """Returns the number of the bucket to send now; None where there is none.

        Of the buckets that are next for their servers, the one that forward needs first is sent.
        """
        with_room = [queue.next_with_room() for queue in self.queues.values()]
        free = [number for number in with_room if number is not None]
        if free:
            return min(free)
        over_limit = (queue.next_over_limit() for queue in self.queues.values())
        return next((number for number in over_limit if number is not None), None)

    def _bytes_under_way(self) -> int:
        """Returns how many bytes are under way to all servers."""
        return sum(int(queue.under_way) for queue in self.queues.values())

    def _answered(self, lane: Any, beginnings: int, future: "Future[Any]") -> None:
        """Takes an answer, in a thread of the transport.

        What goes wrong here is raised where the worker waits.
        """
        came = time.perf_counter()
        if beginnings != self._beginnings:
            return
        try:
            answer = future.value()
        except Exception as error:
            self.fail(lane.failure(error))
            return
        try:
            if not self._has_room_for_all:
                with self._changed:
                    self.queues[lane.bucket.server].answered(lane.number)
                # There is room for another bucket, which travels while this one is written.
                self._send()
            lane.take(answer)
            self.on_answered(lane, came, self._bytes_under_way())
            with self._changed:
                lane.is_fresh = True
                self._changed.notify_all()
        except Exception as error:
            self.fail(error)
