"""The figures of runs: a row for each run (results.csv), and their mean and range for each kind of run."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from hvdtrain.report.columns import COLUMNS, MEANS, format_figure
from hvdtrain.report.table import Cell, Table
from hvdtrain.runs.read import Run, finished_by_kind

Row = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Mean and range of a figure over the n repeats that have it; all NaN if one of them is (it diverged)."""

    mean: float
    low: float
    high: float
    n: int


def result_rows(runs: Sequence[Run]) -> list[Row]:
    """One row of COLUMNS for each finished run, in display order of kinds, then of repeats."""
    finished = (run for members in finished_by_kind(runs).values() for run in members)
    rows: list[Row] = [{name: column.of(run) for name, column in COLUMNS.items()} for run in finished]
    one_worker = [row for row in rows if row["workers"] == 1 and row["samples_per_s"]]
    matched = []  # rows that have one on one worker to be compared with: in strong scaling, and in weak
    for weak in (False, True):
        keys = {_scaling_key(row, weak) for row in one_worker}
        matched.append(sum(_scaling_key(row, weak) in keys for row in rows))
    is_weak = matched[1] > matched[0]
    for row in rows:
        key = _scaling_key(row, is_weak)
        alike = [one for one in one_worker if _scaling_key(one, is_weak) == key]
        same_kind = [one for one in alike if all(one[n] == alike[0][n] for n in ("mode", "servers", "variant"))]
        same_repeat = [one for one in same_kind if one["repeat"] == row["repeat"]]
        speed = spread([one["samples_per_s"] for one in same_repeat or same_kind], "samples_per_s")
        if speed and row["samples_per_s"] is not None:
            row["scaling_efficiency"] = row["samples_per_s"] / (row["workers"] * speed.mean)
    return rows


def _scaling_key(row: Row, is_weak: bool) -> Hashable:
    """What runs have in common that scaling compares: the batch too, for weak scaling that of a worker."""
    batch = row["global_batch"]
    compared = batch / row["workers"] if is_weak and batch is not None else batch
    return row["model"], row["threads_per_worker"], row["sprint"], compared


def spread(values: Sequence[float | None], name: str = "") -> Spread | None:
    """Mean and range of the values that are not None: the geometric mean where the column of this name says so."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    if any(map(math.isnan, present)):
        return Spread(math.nan, math.nan, math.nan, len(present))
    low, high = min(present), max(present)
    is_geometric = name in COLUMNS and COLUMNS[name].is_geometric and low > 0
    mean = geometric_mean(present) if is_geometric else sum(present) / len(present)
    return Spread(min(max(mean, low), high), low, high, len(present))  # within them, whatever is rounded


def format_cell(
    name: str, of: Spread | None, runs: int = 0, format_value: Callable[[str, float], str] = format_figure
) -> Cell:
    """A figure's mean with its unit, and details: the range, as `7.6–11.2`, and how many of the runs have it, where not
    all do. Empty for none.
    """
    if not of:
        return Cell()
    details, low, high = [], format_value(name, of.low), format_value(name, of.high)
    if low != high:
        (low_number, _, low_unit), (high_number, _, high_unit) = low.partition(" "), high.partition(" ")
        details.append(f"{low_number}–{high_number}" if low_unit == high_unit else f"{low}–{high}")
    if of.n < runs:
        details.append(f"{of.n} of {runs} runs")
    return Cell(format_value(name, of.mean), of.mean, ", ".join(details))


def cost_table(rows: Sequence[tuple[str, Row]]) -> Table:
    """What runs cost: a line for each label, which repeats share."""
    groups: dict[str, list[Row]] = {}
    for label, row in rows:
        groups.setdefault(label, []).append(row)
    names = [name for name, column in COLUMNS.items() if column.is_shown and any(row[name] for _, row in rows)]
    lines = []
    for label, repeats in groups.items():
        cells = (format_cell(name, spread([row[name] for row in repeats], name), len(repeats)) for name in names)
        lines.append((label, [Cell(str(len(repeats))), *cells]))
    note = "n runs each" + (f", with range: {MEANS}" if len(rows) > len(groups) else "")
    return Table("", [note], "run", ["n", *(COLUMNS[name].heading for name in names)], lines)
