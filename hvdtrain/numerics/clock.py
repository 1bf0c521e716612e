"""Where a step's time goes, and which time is training at all."""

import time
from functools import partial
from typing import Any

import torch
from torch import nn

from hvdtrain.numerics.flat import trained
from hvdtrain.system import trace

PHASES = ("data", "forward", "backward", "comm", "optimizer")  # of a step, in their order
# What else a worker's training time goes to: coming together with the others between two steps, or waiting for them
# at the end of a round of leased shares; waiting for its next share; the newest weights before an evaluation or a
# snapshot; writing down what the step came to.
OTHERS = ("barrier", "lease", "refresh", "metrics")
PARTS = PHASES + OTHERS
WAITS = ("comm", "barrier", "lease", "refresh")  # in which a worker waits for other processes


class Stopwatch:
    """Moments of a device's work: on a GPU events in its queue, so that the work is measured and not its launch."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, before: Any, after: Any) -> float:
        """Between two moments that have come: see wait_for."""
        return before.elapsed_time(after) / 1000 if self.on_gpu else after - before

    def wait_for(self, moment: Any) -> None:
        if self.on_gpu:
            moment.synchronize()


class Clock:
    """Splits a worker's training time into PARTS, without a gap: where one ends, the next begins.

    Backward ends with the last gradient, before anything enters a collective: what comes after it, inside
    backward() or not, is time the step waits for others.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.watch = Stopwatch(device)
        self.marks: list[tuple[str, Any]] = []
        self.last_gradient: Any = None
        self._before: Any = None  # when the layer before ended, where layers are traced
        traced = self._trace_layers(model) if trace.is_on and not self.watch.on_gpu else set()
        for p in trained(model):
            if p not in traced:
                p.register_hook(self._stamp)

    def _stamp(self, gradient: torch.Tensor) -> None:
        self.last_gradient = self.watch.now()

    def _trace_layers(self, model: nn.Module) -> set[nn.Parameter]:
        """Have each layer's forward and backward written down, each from the end of what came before it to its own.

        Returns:
            The parameters whose gradients are looked at: one a layer, for each hook costs a step some microseconds.
        """

        def ended(*_: Any, what: str) -> None:
            before, self._before = self._before, time.perf_counter()
            self.last_gradient = self._before
            if trace.is_recording():
                trace.span(trace.STEP, what, before, self._before)

        traced = set()
        for name, layer in model.named_modules():
            own = list(layer.parameters(recurse=False))
            if own:
                layer.register_forward_hook(partial(ended, what=f"forward {name}"))
            first = next((p for p in own if p.requires_grad and p not in traced), None)
            if first is not None:
                first.register_hook(partial(ended, what=f"backward {name}"))
                traced.add(first)
        return traced

    def start(self) -> None:
        """Training begins, or goes on after what does not count."""
        self.marks = [("", self.watch.now())]

    def mark(self, part: str) -> None:
        """The part ends here."""
        self.marks.append((part, self.watch.now()))
        self._before = self.marks[-1][1]

    def mark_last_gradient(self, part: str) -> None:
        """The part ended when the last gradient was computed."""
        self.marks.append((part, self.last_gradient))

    def lap(self) -> dict[str, float]:
        """Seconds of each part since the lap before, or since start, up to the last mark."""
        self.watch.wait_for(self.marks[-1][1])
        spent = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self.marks, self.marks[1:], strict=False):
            spent[part] += self.watch.seconds(before, after)
        if trace.is_recording():
            now, last = time.perf_counter(), self.marks[-1][1]
            moments = [moment for _, moment in self.marks]
            if self.watch.on_gpu:
                moments = [now - self.watch.seconds(moment, last) for moment in moments]
            for before, after, (part, _) in zip(moments, moments[1:], self.marks[1:], strict=False):
                trace.span(trace.STEP, part, before, after)
        self.marks = self.marks[-1:]
        return spent


def move(seconds: dict[str, float], source: str, target: str, amount: float) -> dict[str, float]:
    """Seconds of each part, where so many of one belong to another."""
    amount = min(amount, seconds[source])
    return seconds | {source: seconds[source] - amount, target: seconds[target] + amount}


class Timer:
    """Seconds of training, from now on and `before`."""

    def __init__(self, before: float) -> None:
        self._began = time.perf_counter() - before

    def seconds(self) -> float:
        return time.perf_counter() - self._began
