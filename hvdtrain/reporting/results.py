"""The figures of runs: a row for each run (results.csv), and mean and range for each kind."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from hvdtrain.reporting.columns import COLUMNS, MEANS, format_figure
from hvdtrain.reporting.table import Cell, Table
from hvdtrain.runs.read import Run, finished_by_kind

Row = dict[str, Any]


@dataclass(frozen=True)
class MeanAndRange:
    """Mean and range of a figure over the repeats that have it.

    All are NaN if the figure of one repeat is NaN, which has diverged.

    Attributes:
        mean: the mean.
        low, high: the range.
        n: how many repeats have the figure.
    """

    mean: float
    low: float
    high: float
    n: int


def result_rows(runs: Sequence[Run]) -> list[Row]:
    """Returns one row of COLUMNS for each finished run, by kind and then by repeat."""
    rows: list[Row] = []
    for members in finished_by_kind(runs).values():
        for run in members:
            rows.append({name: column.of(run) for name, column in COLUMNS.items()})
    one_worker = [row for row in rows if row["workers"] == 1 and row["samples_per_s"]]
    scales_weakly = _matches(rows, one_worker, True) > _matches(rows, one_worker, False)
    for row in rows:
        baseline = _baseline(row, one_worker, scales_weakly)
        speeds = [single["samples_per_s"] for single in baseline]
        speed = mean_and_range(speeds, "samples_per_s")
        if speed and row["samples_per_s"] is not None:
            row["scaling_efficiency"] = row["samples_per_s"] / (row["workers"] * speed.mean)
    return rows


def _scaling_key(row: Row, is_weak: bool) -> Hashable:
    """Returns what runs have in common whose scaling is compared.

    In strong scaling this includes the global batch, in weak scaling the batch of a worker.
    """
    batch = row["global_batch"]
    if is_weak and batch is not None:
        batch /= row["workers"]
    return row["model"], row["threads_per_worker"], row["sprint"], batch


def _matches(rows: Sequence[Row], one_worker: Sequence[Row], is_weak: bool) -> int:
    """Returns how many rows have a run on one worker to be compared with."""
    keys = {_scaling_key(row, is_weak) for row in one_worker}
    return sum(_scaling_key(row, is_weak) in keys for row in rows)


def _baseline(row: Row, one_worker: Sequence[Row], is_weak: bool) -> list[Row]:
    """Returns the runs on one worker that a run's scaling is compared with.

    They are of one kind, and of the run's repeat if the kind has that.
    """
    key = _scaling_key(row, is_weak)
    alike = [single for single in one_worker if _scaling_key(single, is_weak) == key]
    if not alike:
        return []
    kind = _kind_of_row(alike[0])
    same_kind = [single for single in alike if _kind_of_row(single) == kind]
    same_repeat = [single for single in same_kind if single["repeat"] == row["repeat"]]
    return same_repeat or same_kind


def _kind_of_row(row: Row) -> Hashable:
    return row["mode"], row["servers"], row["variant"]


def mean_and_range(values: Sequence[float | None], name: str = "") -> MeanAndRange | None:
    """Returns mean and range of the values that are not None; None if all are.

    Args:
        values: a figure of each repeat.
        name: the figure's column, which says whether the mean is geometric.
    """
    present = [value for value in values if value is not None]
    n = len(present)
    if not n:
        return None
    if any(map(math.isnan, present)):
        return MeanAndRange(math.nan, math.nan, math.nan, n)
    low = min(present)
    high = max(present)
    is_geometric = name in COLUMNS and COLUMNS[name].is_geometric and low > 0
    mean = geometric_mean(present) if is_geometric else sum(present) / n
    # Rounding may bring the mean of equal values out of their range.
    mean = min(max(mean, low), high)
    return MeanAndRange(mean, low, high, n)


def format_cell(
    name: str,
    figure: MeanAndRange | None,
    runs: int = 0,
    format_value: Callable[[str, float], str] = format_figure,
) -> Cell:
    """Returns the mean of a figure with its unit and details; empty for None.

    The details are the range, as `7.6–11.2`, and how many of the runs have the figure if not all
    do.

    Args:
        name: the figure's column.
        figure: mean and range.
        runs: how many runs there are.
        format_value: returns a value with its unit, by the column's name.
    """
    if not figure:
        return Cell()
    details = []
    low = format_value(name, figure.low)
    high = format_value(name, figure.high)
    if low != high:
        details.append(_range_words(low, high))
    if figure.n < runs:
        details.append(f"{figure.n} of {runs} runs")
    return Cell(format_value(name, figure.mean), figure.mean, ", ".join(details))


def _range_words(low: str, high: str) -> str:
    """Returns `7.6–11.2` for two values with the same unit, which the mean has too."""
    low_number, _, low_unit = low.partition(" ")
    high_number, _, high_unit = high.partition(" ")
    return f"{low_number}–{high_number}" if low_unit == high_unit else f"{low}–{high}"


def cost_table(rows: Sequence[tuple[str, Row]]) -> Table:
    """Returns the table of what runs cost: a line for each label, which repeats share."""
    groups: dict[str, list[Row]] = {}
    for label, row in rows:
        groups.setdefault(label, []).append(row)
    names = []
    for name, column in COLUMNS.items():
        if column.is_shown and any(row[name] for _, row in rows):
            names.append(name)
    lines = []
    for label, repeats in groups.items():
        cells = [Cell(str(len(repeats)))]
        for name in names:
            figure = mean_and_range([row[name] for row in repeats], name)
            cells.append(format_cell(name, figure, len(repeats)))
        lines.append((label, cells))
    note = "n runs each"
    if len(rows) > len(groups):
        note += f", with range: {MEANS}"
    headings = ["n", *(COLUMNS[name].heading for name in names)]
    return Table("", [note], "run", headings, lines)
