"""The progress of a run, from the metrics that its workers write while they train."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hvdtrain.base.config.untrusted import parse_json, regular

# A worker's first steps after each start of a run. They are slower than all others, and percentiles
# leave them out.
WARM_UP = 5
# The warm-up of a sprint, at least in seconds and as a share: see warm_up_s.
WARM_UP_S = 0.5
WARM_UP_SHARE = 0.25
# Bytes that are read at the end of a file: some hundred steps.
TAIL = 2**15
_FIGURES = ("step", "epoch", "time", "samples")


def warm_up_s(sprint: float) -> float:
    """Returns the seconds of training that a sprint does not count, beside WARM_UP steps.

    The first steps are slower, as processes settle on cores and in memory. On two cores, steps were
    steady after half a second (tests/benchmarks/README.md).

    Args:
        sprint: the sprint's length in seconds.
    """
    return max(WARM_UP_S, WARM_UP_SHARE * sprint)


def metrics_file(folder: Path, rank: int) -> Path:
    return folder / f"metrics.rank{rank}.jsonl"


def last_steps(file: Path, tail: int = TAIL) -> list[dict[str, Any]]:
    """Returns the last steps in a worker's metrics, without a line that is being written.

    Args:
        tail: how many bytes are read at the file's end.
    """
    try:
        with regular(file).open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            begin = max(0, size - tail)
            stream.seek(begin)
            text = stream.read()
    except OSError:
        return []
    lines = text.split(b"\n")[:-1]  # what follows the last newline is being written
    if begin:
        lines = lines[1:]  # the first line was cut
    steps = []
    for line in lines:
        try:
            row = parse_json(line)
            if all(isinstance(row[name], (int, float)) for name in _FIGURES):
                steps.append(row)
        except (ValueError, KeyError, TypeError):  # another program wrote the line
            continue
    return steps


def samples_per_s(workers: Iterable[list[dict[str, Any]]]) -> float | None:
    """Returns the throughput of all workers over the last steps of each.

    Args:
        workers: each worker's last steps.

    Returns:
        Samples per second of training; None if it is not known yet.
    """
    rates = []
    for steps in workers:
        if len(steps) < 2:
            continue
        seconds = steps[-1]["time"] - steps[0]["time"]
        if seconds > 0:
            rates.append(sum(row["samples"] for row in steps[1:]) / seconds)
    return sum(rates) if rates else None
