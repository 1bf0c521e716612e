"""Timing of training: the parts of each step, and the training time in all."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hvdtrain.base.numerics.flat import trained
from hvdtrain.base.system import trace

PHASES = ("data", "forward", "backward", "comm", "optimizer")  # of a step, in their order
# Other parts of a worker's training time:
# - barrier: meeting the other workers between two steps, or at the end of a round of leased shares
# - lease: waiting for the next share
# - refresh: pulling the newest weights before an evaluation or a snapshot
# - metrics: writing the step's metrics
OTHERS = ("barrier", "lease", "refresh", "metrics")
PARTS = PHASES + OTHERS
WAITS = ("comm", "barrier", "lease", "refresh")  # parts in which a worker waits for other processes
COMPUTING = ("forward", "backward")
# Parts before COMPUTING: at the end of these a clock reads the processor time. To read it is a system
# call. Within COMPUTING it is enough to read it at the end of backward.
BEFORE_COMPUTING = ("data", "optimizer")

# The shortest wait for weights that is traced. Most layers find their weights at once.
SHORTEST_S = 5e-5

Stretch = tuple[Any, Any]  # the moments, of a Stopwatch, at which something began and ended
Mark = tuple[str, Any]  # a part, and the moment, of a Stopwatch, at which it ended


@dataclass(frozen=True)
class Lap:
    """A stretch of training, a step for example, whose parts have not been told apart yet.

    Attributes:
        marks: each part, and when it ended. The first mark is the beginning of the lap.
        computing_cpu_seconds: processor seconds of the worker's thread in COMPUTING. They leave out
            the time in which other threads had its core. 0 on a GPU.
        is_traced: whether spans are recorded in the lap.
    """

    marks: list[Mark]
    computing_cpu_seconds: float
    is_traced: bool


class Stopwatch:
    """Takes moments of a device's work.

    On a GPU they are events in its queue, so that the work is timed, and not the launch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.now: Callable[[], Any] = self._event if self.on_gpu else time.perf_counter

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        # Each thread has another current device.
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, before: Any, after: Any) -> float:
        """Returns the seconds between two moments that the device has reached: see wait_for."""
        return before.elapsed_time(after) / 1000 if self.on_gpu else after - before

    def wait_for(self, moment: Any) -> None:
        """Blocks until the device has reached the moment."""
        if self.on_gpu:
            moment.synchronize()

    def has_come(self, moment: Any) -> bool:
        """Returns whether the device has reached the moment. A processor always has."""
        return not self.on_gpu or moment.query()


class Stretches:
    """Collects when a device did something, whichever thread launched it."""

    def __init__(self, device: torch.device) -> None:
        self._watch = Stopwatch(device)
        self._done: deque[Stretch] = deque()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Records the time of the block."""
        began = self._watch.now()
        yield
        self._done.append((began, self._watch.now()))

    def take(self) -> list[Stretch]:
        """Returns the stretches that have ended since the last call."""
        ended = []
        while self._done and self._watch.has_come(self._done[0][1]):
            ended.append(self._done.popleft())
        return ended


class Clock:
    """Splits a worker's training time into PARTS without gaps: where one ends, the next begins.

    Backward ends with the last gradient, before anything enters a collective. What comes after it,
    inside backward() or not, is time in which the step waits for other processes.

    Args:
        model: the model.
        device: the device that computes.
        alone: whether there are no other processes. Then backward lasts until it has ended.
        noted: parameters whose gradients someone else notes: they get no hook, which would cost
            some microseconds a step.

    Attributes:
        hidden_s: seconds of the optimizer's work for which nothing waited, in the lap that was
            divided last.
        computing_cpu_seconds: of the last lap that has ended: see Lap.
        lapped_s: seconds of all laps since `start`: what their parts add up to.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        alone: bool = False,
        noted: Sequence[torch.Tensor] = (),
    ) -> None:
        self.watch = Stopwatch(device)
        self.alone = alone
        self.marks: list[Mark] = []
        self.last_gradient: Any = None
        self.hidden_s = 0.0
        self.lapped_s = 0.0
        self.computing_cpu_seconds = 0.0
        # The parts at whose end the processor time is read: see BEFORE_COMPUTING.
        self._read_at = {*BEFORE_COMPUTING, "backward"}
        if alone:  # `comm` is the end of backward then: see `lap`
            self._read_at.add("comm")
        # The same of the lap that goes on.
        self._computed_cpu_s = 0.0
        # The processor time of this thread when it was read at a mark, and at the last gradient.
        self._cpu_at_mark = 0.0
        self._cpu_at_gradient = 0.0
        # How many gradients have been noted since the last backward, and the fewest of a backward.
        self._gradients = 0
        self._fewest = 0
        self._before: Any = None  # when the previous layer ended, if layers are traced
        traced = self._trace_layers(model) if trace.is_on and not self.watch.on_gpu else set()
        without_hook = traced | set(noted)
        for p in trained(model):
            if p not in without_hook:
                p.register_hook(lambda gradient: self.note_gradient())

    def note_gradient(self) -> None:
        """Notes the moment at which a gradient was computed, which may be the last one.

        The processor time is read once as many gradients have come as each backward has had: to
        read it is a system call.
        """
        self.last_gradient = self.watch.now()
        self._gradients += 1
        if self._gradients >= self._fewest:
            self._cpu_at_gradient = self._cpu_now()

    def _cpu_now(self) -> float:
        """Returns the processor time of this thread; 0 on a GPU, where threads do not compute."""
        return 0.0 if self.watch.on_gpu else time.thread_time()

    def _trace_layers(self, model: nn.Module) -> set[nn.Parameter]:
        """Registers hooks that trace each layer's forward and backward.

        A layer's span begins where the previous one ended.

        Returns:
            The parameters with a hook for their gradients. Each layer has one, since a hook costs
            some microseconds a step.
        """

        def ended(*_: Any, name: str) -> None:
            before = self._before
            self._before = self.last_gradient = time.perf_counter()
            self._cpu_at_gradient = self._cpu_now()
            if trace.is_recording():
                trace.span(trace.STEP, name, before, self._before)

        traced = set()
        for name, layer in model.named_modules():
            parameters = list(layer.parameters(recurse=False))
            if parameters:
                layer.register_forward_hook(partial(ended, name=f"forward {name}"))
            untraced = (p for p in parameters if p.requires_grad and p not in traced)
            first = next(untraced, None)
            if first is not None:
                first.register_hook(partial(ended, name=f"backward {name}"))
                traced.add(first)
        return traced

    def start(self) -> None:
        """Begins a lap, at the start of training or after work that does not count."""
        self.marks = [("", self.watch.now())]
        self.lapped_s = 0.0
        self._computed_cpu_s = 0.0
        self._cpu_at_mark = self._cpu_now()

    def mark(self, part: str) -> None:
        """Ends a part of the lap."""
        moment = self.watch.now()
        self.marks.append((part, moment))
        self._before = moment
        if part in self._read_at:
            self._end_cpu(part, self._cpu_now())

    def mark_last_gradient(self, part: str) -> None:
        """Ends a part at the moment at which the last gradient was computed."""
        self.marks.append((part, self.last_gradient))
        if self._gradients < self._fewest:  # the processor time was not read
            self._cpu_at_gradient = self._cpu_now()
        is_first = self._fewest == 0
        self._fewest = self._gradients if is_first else min(self._fewest, self._gradients)
        self._gradients = 0
        self._end_cpu(part, self._cpu_at_gradient)

    def _end_cpu(self, part: str, cpu_s: float) -> None:
        """Counts the processor time of a part that ends.

        Args:
            cpu_s: the processor time of this thread at the end of the part.
        """
        # Without other processes, `comm` is the end of backward: see `lap`.
        if part in COMPUTING or (part == "comm" and self.alone):
            self._computed_cpu_s += max(0.0, cpu_s - self._cpu_at_mark)
        self._cpu_at_mark = cpu_s

    def wait(self) -> None:
        """Blocks until the device has reached the last mark."""
        self.watch.wait_for(self.marks[-1][1])

    def lap(
        self, waits: Sequence[Stretch] = (), updates: Sequence[Stretch] = ()
    ) -> dict[str, float]:
        """Blocks until the device has reached the last mark, and ends the lap there.

        Returns:
            The seconds of each part: see `divide`.
        """
        return self.divide(self.end_lap(), waits, updates)

    def end_lap(self) -> Lap:
        """Ends the lap at the last mark, where the next one begins."""
        lap = Lap(self.marks, self._computed_cpu_s, trace.is_recording())
        self.marks = self.marks[-1:]
        self.computing_cpu_seconds = self._computed_cpu_s
        self._computed_cpu_s = 0.0
        return lap

    def divide(
        self, lap: Lap, waits: Sequence[Stretch], updates: Sequence[Stretch]
    ) -> dict[str, float]:
        """Blocks until the device has reached the lap's end, and divides the lap into parts.

        Args:
            waits: when this worker waited for weights, within whichever part.
            updates: when its optimizer was at work in another thread, or within `comm`; no two of
                them overlap.

        Returns:
            The seconds of each part.
        """
        marks = lap.marks
        if self.watch.on_gpu:
            last = marks[-1][1]
            self.watch.wait_for(last)
            now = time.perf_counter()

            def clock_time(moment: Any) -> float:
                """Returns the moment by time.perf_counter, also of an event of a GPU."""
                if isinstance(moment, torch.cuda.Event):
                    return now - self.watch.seconds(moment, last)
                return moment

            marks = [(part, clock_time(moment)) for part, moment in marks]
            waits = [(clock_time(began), clock_time(ended)) for began, ended in waits]
            updates = [(clock_time(began), clock_time(ended)) for began, ended in updates]
        self.lapped_s += marks[-1][1] - marks[0][1]
        spent = dict.fromkeys(PARTS, 0.0)
        self.hidden_s = seconds_of(cut_to(marks[0][1], marks[-1][1], updates))
        for part, outer_part, (began, ended) in divide(marks, waits, updates):
            seconds = ended - began
            spent[part] += seconds
            if outer_part:
                spent[outer_part] -= seconds
            if outer_part == "comm":
                self.hidden_s -= seconds
            if lap.is_traced and (not outer_part or seconds > SHORTEST_S):
                trace.span(trace.STEP, part, began, ended)
        return move(spent, "comm", "backward", spent["comm"]) if self.alone else spent


def divide(
    marks: Sequence[tuple[str, float]], waits: Sequence[Stretch], updates: Sequence[Stretch]
) -> Iterator[tuple[str, str, Stretch]]:
    """Divides a lap into parts, some of which lie within others.

    A wait for weights is `comm`, whichever part it lies in. The optimizer's work within `comm` is
    `optimizer`. If each part is subtracted from the part in which it lies, every moment of the lap
    belongs to exactly one part.

    Args:
        marks: each part, and when it ended. The first mark is the beginning of the lap.
        waits, updates: see Clock.divide.

    Yields:
        A part, the part in which it lies (empty for none), and its stretch. Outer parts come before
        the parts within them.
    """
    for (_, began), (part, ended) in pairwise(marks):
        yield part, "", (began, ended)
        waited = [(began, ended)] if part == "comm" else cut_to(began, ended, waits)
        for since, until in waited:
            if part != "comm":
                yield "comm", part, (since, until)
            for update in cut_to(since, until, updates):
                yield "optimizer", "comm", update


def cut_to(began: float, ended: float, stretches: Sequence[Stretch]) -> list[Stretch]:
    """Returns the parts of the stretches that lie between the two moments."""
    parts = [(max(began, first), min(ended, last)) for first, last in stretches]
    return [(first, last) for first, last in parts if first < last]


def seconds_of(stretches: Sequence[Stretch]) -> float:
    return sum(last - first for first, last in stretches)


def move(seconds: dict[str, float], source: str, target: str, amount: float) -> dict[str, float]:
    """Returns the seconds of each part after moving up to an amount from one to another."""
    amount = min(amount, seconds[source])
    return seconds | {source: seconds[source] - amount, target: seconds[target] + amount}


class Timer:
    """The seconds of training: those `before`, and from now on."""

    def __init__(self, before: float) -> None:
        self.before = before
        self._began = time.perf_counter() - before

    def seconds(self) -> float:
        return time.perf_counter() - self._began
