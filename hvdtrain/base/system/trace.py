"""The recorder of --trace: what this rank did when, for one timeline of all ranks.

Each process has one recorder, since spans come from many places: backward's hooks, rpc's threads,
servers. While nothing is recorded, a call costs a comparison.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.base.errors import UsageError

# (track, name, began, ended, flow), with moments in seconds of time.perf_counter. Spans of one
# message have the same flow; 0 is none.
Span = tuple[str, str, float, float, int]
Count = tuple[str, float, float]  # name, moment, value

# Tracks.
STEP = "step"
PUSH = "push"
PULL = "pull"
UNDER_WAY = "under way"
APPLY = "apply"
REDUCE = "all-reduce"
STEP_NUMBER = "step number"  # a counter of workers

spans: list[Span] = []
counts: list[Count] = []
is_on = False  # --trace was given
_first, _last = 1, math.inf  # the steps that are recorded
_is_at_recorded_step = False


def begin(steps: str) -> None:
    """Begins to record these steps: see parse_steps."""
    global is_on, _first, _last
    is_on = True
    _first, _last = parse_steps(steps)


def parse_steps(text: str) -> tuple[int, float]:
    """Returns the first and the last step of `100-150` or `all`.

    Raises:
        UsageError: the text is anything else.
    """
    if text == "all":
        return 1, math.inf
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UsageError(f"--trace-steps {text}: give the first and the last step, as 100-150")
    return int(first), int(last)


def records(step: int) -> bool:
    """Returns whether spans of this step are recorded."""
    return is_on and _first <= step <= _last


def at_step(step: int) -> None:
    """Notes that the worker begins this step."""
    global _is_at_recorded_step
    _is_at_recorded_step = records(step)
    if _is_at_recorded_step:
        count(STEP_NUMBER, step)


def is_recording() -> bool:
    """Returns whether spans of the worker's present step are recorded."""
    return _is_at_recorded_step


def span(track: str, name: str, began: float, ended: float, flow: int = 0) -> None:
    """Records a span."""
    spans.append((track, name, began, ended, flow))


def count(name: str, value: float) -> None:
    """Records the value that a counter has from now on."""
    counts.append((name, time.perf_counter(), value))


@contextmanager
def spanning(name: str) -> Iterator[None]:
    """Records a span of the worker's step for the block, if the step is recorded."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if _is_at_recorded_step:
            span(STEP, name, began, time.perf_counter())


def reduction(size: int, began: float) -> None:
    """Records an all-reduce that ends now.

    Args:
        size: bytes of gradients.
        began: when they were handed over.
    """
    span(REDUCE, f"{size / 1e6:.2g} MB", began, time.perf_counter())


def flow_of(step: int, worker: int, server: int, bucket: int) -> int:
    """Returns a positive number that all ranks give a push and its answer."""
    return step << 40 | worker << 28 | server << 16 | bucket
