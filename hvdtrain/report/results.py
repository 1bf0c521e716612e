"""The figures of runs: a row for each run (results.csv), and their mean and range for each kind of run."""

import csv
import io
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import geometric_mean
from typing import Any

from hvdtrain.report.columns import COLUMNS, MEANS, Setting, format_figure
from hvdtrain.report.table import Cell, Table
from hvdtrain.runs.read import Kind, Run, finished_by_kind

Row = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Mean and range of a figure over the n repeats that have it; all NaN if one of them is (it diverged)."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Group:
    """The n runs of one kind and setting: a Spread for each figure, None where no run has it."""

    setting: Setting
    kind: Kind
    n: int
    figures: dict[str, Spread | None]

    def __getitem__(self, figure: str) -> Spread | None:
        return self.figures[figure]


def result_rows(runs: Sequence[Run]) -> list[Row]:
    """One row of COLUMNS for each finished run, in display order of kinds, then of repeats."""
    finished = (run for members in finished_by_kind(runs).values() for run in members)
    rows: list[Row] = [{name: column.of(run) for name, column in COLUMNS.items()} for run in finished]
    is_weak = scales_weakly(rows)
    baselines = _baselines(rows, is_weak)
    for row in rows:
        key = row["threads_per_worker"], row["sprint"], _scaling_key(row, is_weak)
        row["scaling_efficiency"] = _scaling_efficiency(row, baselines.get(key, []))
    return rows


def csv_text(rows: Sequence[Row]) -> str:
    """results.csv: the rows with a header; None is an empty cell, numbers have all their digits."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def summarise(rows: Sequence[Row]) -> list[Group]:
    """The figures over their repeats, one Group for each kind, by setting, then in the rows' order."""
    kinds: dict[tuple[Setting, Kind], list[Row]] = {}
    for row in rows:
        kinds.setdefault((Setting.of_row(row), Kind.of_row(row)), []).append(row)
    figures = [name for name, column in COLUMNS.items() if not column.identifies]
    return [
        Group(setting, kind, len(members), {n: spread([row[n] for row in members], n) for n in figures})
        for (setting, kind), members in sorted(kinds.items(), key=lambda item: item[0][0].order)
    ]


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


def format_cell(group: Group, name: str) -> Cell:
    """A figure's mean with its unit, and details: the range, and how many runs have it. Empty for none."""
    found = group[name]
    if not found:
        return Cell()
    details = [format_range(name, found)] if found.low != found.high else []
    if found.n < group.n:
        details.append(f"{found.n} of {group.n} runs")
    return Cell(format_figure(name, found.mean), found.mean, ", ".join(filter(None, details)))


def format_range(name: str, found: Spread, format_value: Callable[[str, float], str] = format_figure) -> str:
    """`7.6–11.2`, without a unit that both have, as the mean has it too; empty where both ends read the same."""
    low, high = format_value(name, found.low), format_value(name, found.high)
    if low == high:
        return ""
    (low_number, _, low_unit), (high_number, _, high_unit) = low.partition(" "), high.partition(" ")
    return f"{low_number}–{high_number}" if low_unit == high_unit else f"{low}–{high}"


def cost_table(groups: Sequence[Group]) -> Table:
    """What the groups cost, behind what their settings differ in."""
    varied = Setting.varied(group.setting for group in groups)
    columns = [c for c in COLUMNS.values() if c.is_shown and any(group[c.name] for group in groups)]
    rows = []
    for group in groups:
        setting = [Cell(group.setting.text(name)) for name in varied]
        cells = [format_cell(group, column.name) for column in columns]
        rows.append((group.kind.label, [*setting, Cell(str(group.n)), *cells]))
    headings = [*(COLUMNS[name].heading for name in varied), "n", *(column.heading for column in columns)]
    notes = ["n runs each" + (f", with range: {MEANS}" if any(group.n > 1 for group in groups) else "")]
    return Table("costs", "", notes, "run", [("", text) for text in headings], rows)


def scales_weakly(rows: Sequence[Row]) -> bool:
    """Whether the global batch grows with the number of workers (weak scaling), rather than being the same.

    A grid of several batch sizes has some of both: that decides by which more runs share a batch with runs on another
    number of workers.
    """

    def sharing_runs(is_weak: bool) -> int:
        workers: dict[Hashable, set[int]] = {}
        for row in rows:
            workers.setdefault(_scaling_key(row, is_weak), set()).add(row["workers"])
        return sum(len(workers[_scaling_key(row, is_weak)]) > 1 for row in rows)

    return sharing_runs(True) > sharing_runs(False)


def _scaling_key(row: Row, is_weak: bool) -> Hashable:
    """What runs have in common that scaling compares: the model, and the batch, for weak scaling that of a worker."""
    batch = row["global_batch"]
    return (
        row["model"],
        row["threads_per_worker"],
        Fraction(batch, row["workers"]) if is_weak and batch is not None else batch,
    )


def _baselines(rows: Sequence[Row], is_weak: bool) -> dict[Hashable, list[Row]]:
    """The one-worker baselines by threads, model and batch, chosen as the column scaling_efficiency says."""
    found: dict[Hashable, dict[Kind, list[Row]]] = {}
    for row in rows:
        if row["workers"] == 1 and row["samples_per_s"]:
            kinds = found.setdefault((row["threads_per_worker"], row["sprint"], _scaling_key(row, is_weak)), {})
            kinds.setdefault(Kind.of_row(row), []).append(row)
    return {key: kinds[min(kinds, key=lambda kind: kind.order)] for key, kinds in found.items()}


def _scaling_efficiency(row: Row, baseline: Sequence[Row]) -> float | None:
    same_repeat = [other for other in baseline if other["repeat"] == row["repeat"]]
    speed = spread([other["samples_per_s"] for other in same_repeat or baseline], "samples_per_s")
    return row["samples_per_s"] / (row["workers"] * speed.mean) if speed and row["samples_per_s"] is not None else None
