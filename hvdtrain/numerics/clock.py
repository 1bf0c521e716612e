"""Where a step's time goes, and which time is training at all."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hvdtrain.numerics.flat import trained

PHASES = ("data", "forward", "backward", "comm", "optimizer")  # of a step, in their order


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
    """Splits a step into PHASES.

    Backward ends with the last gradient, before anything enters a collective: what comes after it, inside
    backward() or not, is time the step waits for others.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.watch = Stopwatch(device)
        self.marks: list[tuple[str, Any]] = []
        self.last_gradient: Any = None
        for p in trained(model):
            p.register_hook(self._stamp)

    def _stamp(self, gradient: torch.Tensor) -> None:
        self.last_gradient = self.watch.now()

    def start(self) -> None:
        self.marks = [("", self.watch.now())]

    def mark(self, phase: str) -> None:
        """The phase ends here."""
        self.marks.append((phase, self.watch.now()))

    def mark_last_gradient(self, phase: str) -> None:
        """The phase ended when the last gradient was computed."""
        self.marks.append((phase, self.last_gradient))

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since start."""
        self.watch.wait_for(self.marks[-1][1])
        spent = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(self.marks, self.marks[1:], strict=False):
            spent[phase] += self.watch.seconds(before, after)
        return spent


class Timer:
    """Seconds of training, with what is not training left out."""

    def __init__(self, before: float) -> None:
        self._began = time.perf_counter() - before

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in the block does not count."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began
