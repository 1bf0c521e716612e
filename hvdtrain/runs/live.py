"""How far a run is, from the metrics that its workers write while they train."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hvdtrain.config.untrusted import parse_json, regular

WARM_UP = 5  # steps of a worker after each start of a run, slower than all others: apart from the percentiles
WARM_UP_S, WARM_UP_SHARE = 1.0, 0.6  # see warm_up_s
TAIL = 2**15  # bytes at the end of a file that are looked at: a hundred steps


def warm_up_s(sprint: float) -> float:
    """Seconds of training that a sprint of so many does not count, nor WARM_UP steps: steps become faster for some
    seconds, as processes settle on cores and in memory.
    """
    return max(WARM_UP_S, WARM_UP_SHARE * sprint)


def metrics_file(folder: Path, rank: int) -> Path:
    return folder / f"metrics.rank{rank}.jsonl"


def last_steps(file: Path, tail: int = TAIL) -> list[dict[str, Any]]:
    """The last steps in a worker's metrics; none where there are none yet. A line that is being written is left out."""
    try:
        with regular(file).open("rb") as lines:
            begin = max(0, lines.seek(0, 2) - tail)
            lines.seek(begin)
            text = lines.read()
    except OSError:
        return []
    whole = text[: text.rfind(b"\n") + 1].split(b"\n")[1 if begin else 0 : -1]
    steps = []
    for line in whole:
        try:
            row = parse_json(line)
            if all(isinstance(row[name], (int, float)) for name in ("step", "epoch", "time", "samples")):
                steps.append(row)
        except (ValueError, KeyError, TypeError):  # another program's
            continue
    return steps


def samples_per_s(workers: Iterable[list[dict[str, Any]]]) -> float | None:
    """Samples of all workers a second of training, from the last steps of each; None where that is not known yet."""
    rates = [
        sum(row["samples"] for row in steps[1:]) / (steps[-1]["time"] - steps[0]["time"])
        for steps in workers
        if len(steps) > 1 and steps[-1]["time"] > steps[0]["time"]
    ]
    return sum(rates) if rates else None
