"""What this rank did when, written down while it happens, for one timeline of all ranks: --trace.

One recorder a process, since what happens is noticed in many places: in backward's hooks, in rpc's threads, on servers.
While nothing is recorded a call costs a comparison.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.errors import UsageError

# (track, name, began, ended, flow): seconds of time.perf_counter; equal flows are one message on its way, 0 is none.
Span = tuple[str, str, float, float, int]
Count = tuple[str, float, float]  # name, moment, value

# Tracks.
STEP, PUSH, PULL, UNDER_WAY, APPLY, REDUCE = "step", "push", "pull", "under way", "apply", "all-reduce"
STEP_NUMBER = "step number"  # a counter of workers

spans: list[Span] = []
counts: list[Count] = []
is_on = False  # --trace was given
_first, _last = 1, math.inf  # steps that are recorded
_is_at_recorded_step = False


def begin(steps: str) -> None:
    """Record these steps from now on: see parse_steps."""
    global is_on, _first, _last
    is_on = True
    _first, _last = parse_steps(steps)


def parse_steps(text: str) -> tuple[int, float]:
    """The first and the last step of `100-150` or `all`. UsageError for anything else."""
    if text == "all":
        return 1, math.inf
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UsageError(f"--trace-steps {text}: give the first and the last step, as 100-150")
    return int(first), int(last)


def records(step: int) -> bool:
    """Whether what belongs to this step is written down."""
    return is_on and _first <= step <= _last


def at_step(step: int) -> None:
    """The worker begins this step."""
    global _is_at_recorded_step
    _is_at_recorded_step = records(step)
    if _is_at_recorded_step:
        count(STEP_NUMBER, step)


def is_recording() -> bool:
    """Whether what this worker does now is written down."""
    return _is_at_recorded_step


def span(track: str, name: str, began: float, ended: float, flow: int = 0) -> None:
    """Something took from then to then."""
    spans.append((track, name, began, ended, flow))


def count(name: str, value: float) -> None:
    """Something has this value from now on."""
    counts.append((name, time.perf_counter(), value))


@contextmanager
def spanning(name: str) -> Iterator[None]:
    """What the block takes of the worker's time, if it is recorded."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if _is_at_recorded_step:
            span(STEP, name, began, time.perf_counter())


def reduction(size: int, began: float) -> None:
    """So many bytes of gradients were handed over then to be averaged, and are found averaged now."""
    span(REDUCE, f"{size / 1e6:.2g} MB", began, time.perf_counter())


def flow_of(step: int, worker: int, server: int, bucket: int) -> int:
    """What one push and its answer have in common on all ranks; above 0."""
    return step << 40 | worker << 28 | server << 16 | bucket
