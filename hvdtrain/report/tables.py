"""The figures of a comparison: one row a run (results.csv), and one a kind of run with median and spread."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.report.runs import Kind, Run, grouped

Row = dict[str, Any]

# The columns of results.csv in their order, each with what it means. An empty cell: not measured, or not
# applicable.
COLUMNS = {
    "mode": "how the workers are kept in step",
    "workers": "processes that compute gradients",
    "servers": "processes that hold the weights and apply the optimizer (parameter-server modes)",
    "model": "the network",
    "parameters": "its trainable weights",
    "global_batch": "samples of one step, over all workers together",
    "steps": "steps done, each of one global batch; where workers do not keep step, those of the worker that did most",
    "samples": "samples trained on, over all workers together",
    "wall_s": "seconds of training, without set-up and evaluation",
    "samples_per_s": "samples / wall_s",
    "scaling_efficiency": (
        "samples_per_s / (workers × samples_per_s of the baseline). The baseline is the single run of the "
        "same repeat, else the median of all single runs, else the same mode with one worker (the same "
        "repeat first); empty where there is none. 1 is perfect scaling"
    ),
    "val_accuracy": "accuracy on the validation images at the last evaluation, every image counted once",
    "val_loss": "mean cross-entropy on the validation images at the last evaluation",
    "time_to_target_s": "seconds of training until an evaluation first reached the target accuracy",
    "exposed_comm_fraction": "share of a worker's step in which it waits for communication",
    "bytes_sent_per_step": "bytes of weights and gradients sent in a step by all processes, servers included",
    "staleness_mean": "mean number of updates of the weights from a worker's pull until its push is applied",
    "staleness_max": "the largest such number",
    "peak_rss_mb": (
        "largest resident memory of all processes together, servers included, in MB of 2^20 bytes "
        "(pages that processes share count once for each)"
    ),
    "repeat": "number of the repeat; repeats have different seeds unless said otherwise",
}
FIGURES = (
    "steps", "samples", "wall_s", "samples_per_s", "scaling_efficiency", "val_accuracy", "val_loss",
    "time_to_target_s", "exposed_comm_fraction", "bytes_sent_per_step", "staleness_mean", "staleness_max",
    "peak_rss_mb",
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the n repeats that have the figure; NaN where one is (it diverged)."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Group:
    """The n runs of one kind: a Spread for each of FIGURES, None where no run has it."""

    kind: Kind
    n: int
    figures: dict[str, Spread | None]

    def __getitem__(self, figure: str) -> Spread | None:
        return self.figures[figure]


def results(runs: Sequence[Run]) -> list[Row]:
    """One row of COLUMNS for each finished run, kinds in display order, then repeats."""
    rows = []
    for members in grouped(runs).values():
        for run in members:
            recorded = run.summary | run.manifest
            rows.append({name: recorded.get(name) for name in COLUMNS})
    for row in rows:
        row["scaling_efficiency"] = _efficiency(row, rows)
    return rows


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The rows as CSV with a header; None is an empty cell, numbers have all their digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def summarise(rows: Sequence[Row]) -> list[Group]:
    """The figures over their repeats, one Group for each (mode, workers, servers), in the rows' order."""
    kinds: dict[Kind, list[Row]] = {}
    for row in rows:
        kinds.setdefault(Kind(row["mode"], row["workers"], row["servers"]), []).append(row)
    return [
        Group(kind, len(members), {name: spread([row[name] for row in members]) for name in FIGURES})
        for kind, members in kinds.items()
    ]


def spread(values: Sequence[float | None]) -> Spread | None:
    """Median and range of the values that are there."""
    there = [v for v in values if v is not None]
    if not there:
        return None
    if any(map(math.isnan, there)):
        return Spread(math.nan, math.nan, math.nan, len(there))
    return Spread(median(there), min(there), max(there), len(there))


def baseline(row: Row, rows: Sequence[Row]) -> float | None:
    """Samples/s on one worker to hold the row against, chosen as COLUMNS['scaling_efficiency'] says."""
    single = [r for r in rows if r["mode"] == "single"]
    own = [r for r in rows if r["mode"] == row["mode"] and r["workers"] == 1]
    # With as many servers where there is such a run: a second server is no worker.
    own = [r for r in own if r["servers"] == row["servers"]] or own
    for candidates in (single, own):
        for repeat in ([r for r in candidates if r["repeat"] == row["repeat"]], candidates):
            speeds = [r["samples_per_s"] for r in repeat if r["samples_per_s"]]
            if speeds:
                return median(speeds)
    return None


def _efficiency(row: Row, rows: Sequence[Row]) -> float | None:
    one = baseline(row, rows)
    return row["samples_per_s"] / (row["workers"] * one) if one and row["samples_per_s"] is not None else None
