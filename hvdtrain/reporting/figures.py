"""The figures of an answer, as verdict.json has them and as the answer's table shows them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import fmean, geometric_mean
from typing import Any

from hvdtrain.base import modes
from hvdtrain.base.formatting import three_digits
from hvdtrain.reporting import rule
from hvdtrain.reporting.columns import busiest_share, cpu_s_per_1000_samples, format_figure
from hvdtrain.reporting.contenders import (
    Contenders,
    Figure,
    Sides,
    speed,
)
from hvdtrain.reporting.measures import (
    TIME_TO_TARGET,
    only_trainings,
    reaches_by_repeat,
    speed_runs,
)
from hvdtrain.reporting.quality import trained
from hvdtrain.reporting.race import Race
from hvdtrain.reporting.rule import Differences, Lead
from hvdtrain.reporting.table import Cell, Table
from hvdtrain.reporting.target import Reach, Target, reach_of, target_of
from hvdtrain.runs.read import Kind, Run

# How many bootstrap samples the interval of a ratio of times takes.
RESAMPLES = 2000
# exp of a larger logarithm overflows.
_LARGEST_LOG = 700.0
accuracy: Figure = attrgetter("summary.val_accuracy")


def mean_ratio(lead: Lead) -> float:
    """Returns the geometric mean of ratios."""
    return _exp(lead.mean)


def ratio_interval(lead: Lead) -> tuple[float | None, float | None]:
    """Returns the ends of the interval of a ratio; None for an end that is infinite.

    Both are, with fewer than two repeats.
    """
    if lead.n < 2:
        return None, None
    low = _exp(lead.low) if math.isfinite(lead.low) else None
    high = _exp(lead.high) if math.isfinite(lead.high) else None
    return low, high


def _exp(logarithm: Any) -> float:
    return math.exp(min(max(float(logarithm), -_LARGEST_LOG), _LARGEST_LOG))


def format_ratio(value: float) -> str:
    """Returns a ratio as text: `1.28`."""
    return f"{value:.2f}" if 0.1 <= value < 1000 else f"{value:.2g}"


def race_data(race: Race | None) -> dict[str, Any] | None:
    """Returns a race for verdict.json: `run` over `beside`."""
    if not race:
        return None
    low, high = ratio_interval(race.lead)
    _, error = rule.last_look(race.lead.n)
    return {
        "run": race.one.label,
        "beside": race.other.label,
        "ratio": mean_ratio(race.lead),
        "ci_low": low,
        "ci_high": high,
        "n": race.lead.n,
        "confidence": 1 - error,
    }


def difference_data(lead: Lead | None) -> dict[str, Any]:
    """Returns a mean difference with its interval for verdict.json."""
    if not lead:
        return {"difference": None, "ci_low": None, "ci_high": None, "n": 0}
    has_interval = lead.n > 1
    return {
        "difference": float(lead.mean),
        "ci_low": float(lead.low) if has_interval else None,
        "ci_high": float(lead.high) if has_interval else None,
        "n": lead.n,
    }


def mean(runs: Sequence[Run], figure: Figure) -> float | None:
    """Returns the mean over the runs that have the figure; NaN if the figure of one is NaN."""
    values = _present(runs, figure)
    return fmean(values) if values else None


def _present(runs: Sequence[Run], figure: Figure) -> list[float]:
    values = [figure(run) for run in runs]
    return [value for value in values if value is not None]


def reference_kind(contenders: Contenders, sides: Sides) -> Kind:
    """Returns the kind that all rates are divided by.

    It is the fastest ring. Without rings it is the first distributed kind, else the first of any.
    """
    if sides.rings:
        return max(sides.rings, key=lambda kind: _mean_rate(contenders, kind))
    return [*sides.distributed, *sides.machines, *contenders.by_kind][0]


def _mean_rate(contenders: Contenders, kind: Kind) -> float:
    rates = map(contenders.measure.rate, contenders.counted(kind))
    per_s = [rate.per_s for rate in rates if rate]
    return fmean(per_s) if per_s else 0.0


def rows(contenders: Contenders, reference: Kind) -> list[dict[str, Any]]:
    """Returns the figures of each kind for verdict.json, the reference included.

    Kinds that are only a baseline of scaling are left out. Single machines come last.
    """
    kinds = [kind for kind in contenders.by_kind if kind.family] or list(contenders.by_kind)
    kinds.sort(key=lambda kind: kind.family == modes.ONE_MACHINE)
    return [_row(contenders, kind, reference) for kind in kinds]


def _row(contenders: Contenders, kind: Kind, reference: Kind) -> dict[str, Any]:
    """Returns the figures of a kind."""
    runs = contenders.by_kind[kind]
    timed = speed_runs(runs)
    speeds = [value for value in _present(timed, speed) if value]
    log_ratios = Differences([0.0])
    if kind != reference:
        log_ratios = contenders.log_ratios(kind, reference)
    lead = rule.estimate_lead(log_ratios)
    low, high = ratio_interval(lead)
    return {
        "run": kind.label,
        "mode": kind.mode,
        "family": kind.family,
        "n": len(timed),
        "trainings": len(only_trainings(runs)),
        "samples_per_s": geometric_mean(speeds) if speeds else None,
        "least": min(speeds, default=None),
        "most": max(speeds, default=None),
        "ratio": mean_ratio(lead) if lead.n else None,
        "ci_low": low,
        "ci_high": high,
        "ratios": [math.exp(log) for log in log_ratios.values],
        "accuracy": mean(trained(contenders, kind), accuracy),
        "to_target": expected_time(runs) | time_to_target(runs),
        "samples_to_target": _mean_samples(runs),
        "cpu_s_per_1000_samples": mean(timed, cpu_s_per_1000_samples),
        "busiest_share": mean(timed, busiest_share),
    }


def table(data: Mapping[str, Any]) -> Table:
    """Returns the table of an answer, from verdict.json. What decides is in the first column."""
    by_time = data["decided_by"] == TIME_TO_TARGET.name
    columns = _columns_by_time(data) if by_time else _columns_by_speed(data)
    columns |= {"CPU/1,000": _plain_cell("cpu_s_per_1000_samples")}
    columns |= {"busiest": _plain_cell("busiest_share")}
    lines = [(row["run"], [cell(row) for cell in columns.values()]) for row in data["runs"]]
    return Table("", [], "", list(columns), lines)


_CellOf = Callable[[Mapping[str, Any]], Cell]  # of a row of verdict.json


def _columns_by_speed(data: Mapping[str, Any]) -> dict[str, _CellOf]:
    """Returns the first columns of an answer by speed, by their headings."""
    columns = {
        "samples/s": _speed_cell,
        f"× {data['beside']}": _ratio_cell,
        "accuracy": _plain_cell("val_accuracy", "accuracy"),
    }
    if data["target"]:
        columns[f"to {data['target']:g}"] = _expected_time_cell
    return columns


def _columns_by_time(data: Mapping[str, Any]) -> dict[str, _CellOf]:
    """Returns the first columns of an answer by the time to the target, by their headings."""
    return {
        f"to {data['target'] or 0:g}": _time_to_target_cell,
        f"× {data['beside']}": _ratio_cell,
        "samples": _plain_cell("samples_to_target"),
        "samples/s": _speed_cell,
    }


def _plain_cell(column: str, key: str = "") -> _CellOf:
    """Returns what makes the cell of a column.

    Args:
        column: see results.COLUMNS.
        key: of the row, if it is not the column's name.
    """
    return lambda row: _cell(column, row[key or column])


def _speed_cell(row: Mapping[str, Any]) -> Cell:
    spread = ""
    if row["n"] > 1 and row["least"] is not None:
        spread = f"{three_digits(row['least'])}–{three_digits(row['most'])}"
    return _cell("samples_per_s", row["samples_per_s"], spread)


def _ratio_cell(row: Mapping[str, Any]) -> Cell:
    return Cell(mean_words(row), row["ratio"])


def mean_words(row: Mapping[str, Any]) -> str:
    """Returns the ratio of a row of verdict.json: `1.28`, or `≥ 1.28` if it is a bound."""
    if row["ratio"] is None:
        return ""
    sign = ""
    if row["ci_low"] is not None and row["ci_high"] is None:
        sign = "≥ "
    elif row["ci_low"] is None and row["ci_high"] is not None:
        sign = "≤ "
    return sign + format_ratio(row["ratio"])


def _time_to_target_cell(row: Mapping[str, Any]) -> Cell:
    """Returns the mean time to the target, with its range, and how many got there if not all."""
    times = row["to_target"]
    if times["mean"] is None:
        return Cell("–")
    details = []
    if times["n"] > 1:
        details.append(f"{three_digits(times['least'])}–{three_digits(times['most'])}")
    if times["reached"] < times["n"]:
        details.append(f"{times['reached']} of {times['n']}")
    cell = _cell("time_to_target_s", times["mean"], ", ".join(details))
    if times["reached"] == times["n"]:
        return cell
    return replace(cell, text=f"over {cell.text}")


def _cell(column: str, value: float | None, detail: str = "") -> Cell:
    return Cell(format_figure(column, value), value, detail)


def _expected_time_cell(row: Mapping[str, Any]) -> Cell:
    """Returns the expected time to the target, and how many trainings got there if not all did."""
    to_target = row["to_target"]
    reached = to_target["reached"]
    some = "" if reached == to_target["n"] else f"{reached} of {to_target['n']}"
    if not reached:
        return Cell(some or "–")
    return _cell("time_to_target_s", to_target["seconds"], some)


def target(contenders: Contenders) -> Target | None:
    """Returns the target whose time is told; None if no training has one."""
    for runs in contenders.by_kind.values():
        for run in only_trainings(runs):
            found = target_of(run)
            if found and found.value:
                return found
    return None


def target_accuracy(contenders: Contenders) -> float | None:
    """Returns the accuracy whose time is told; None if there is none, or a loss in its place."""
    found = target(contenders)
    return found.value if found and not found.is_loss else None


# The time to the target accuracy, also where not every training reaches it


def reaches(runs: Sequence[Run]) -> list[Reach]:
    """Returns when each training reached its target, or ended without it."""
    return [reach for reach in map(reach_of, only_trainings(runs)) if reach]


def time_to_target(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the seconds to the target that a comparison by time is about, for verdict.json.

    `mean` is geometric, so that the ratio of two kinds is the mean of the ratios of their repeats.
    A training that did not reach the target counts as all of its time: then the true mean is more.
    """
    seconds = [reach.seconds for reach in reaches(runs) if reach.seconds]
    return {
        "mean": geometric_mean(seconds) if seconds else None,
        "least": min(seconds, default=None),
        "most": max(seconds, default=None),
    }


def _mean_samples(runs: Sequence[Run]) -> float | None:
    """Returns the geometric mean of samples to the target; None unless all trainings reached it."""
    reached = reaches(runs)
    if not reached or not all(reach.is_reached and reach.samples for reach in reached):
        return None
    return geometric_mean([reach.samples for reach in reached])


def expected_time(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the expected time to the target for verdict.json.

    That is the time of all trainings over the number that reached the target: the expected running
    time of the COCO benchmarks. The seconds are None if none did.
    """
    spent = reaches(runs)
    total_s = sum(reach.seconds for reach in spent)
    reached = sum(reach.is_reached for reach in spent)
    return {
        "seconds": total_s / reached if reached else None,
        "reached": reached,
        "n": len(spent),
    }


def ratio_of_times(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, Any] | None:
    """Returns the ratio of two kinds' expected times, over the repeats that both have.

    The interval of 95 % is that of a bootstrap over pairs. Its ends are None where they are
    infinite. Returns None if one kind never reached the target.
    """
    import numpy as np

    spent = reaches_by_repeat(runs)
    spent_by_others = reaches_by_repeat(others)
    repeats = sorted(spent.keys() & spent_by_others.keys())
    # [pairs, 2 kinds, (seconds, samples, is reached)]
    pairs = np.array([[spent[repeat], spent_by_others[repeat]] for repeat in repeats], dtype=float)
    if not repeats or not pairs[:, :, 2].sum(0).all():
        return None
    drawn = np.random.default_rng(0).integers(0, len(repeats), (RESAMPLES, len(repeats)))
    with np.errstate(divide="ignore", invalid="ignore"):
        # The first of the totals is of the pairs as they are.
        totals = np.concatenate([pairs.sum(0)[None], pairs[drawn].sum(1)])
        expected = totals[:, :, 0] / totals[:, :, 2]
        ratios = expected[:, 0] / expected[:, 1]
    low = math.nan
    high = math.nan
    if len(repeats) > 1:
        low, high = np.nanquantile(ratios[1:], [0.025, 0.975], method="nearest")
    return {
        "ratio": float(ratios[0]),
        "ci_low": float(low) if math.isfinite(low) else None,
        "ci_high": float(high) if math.isfinite(high) else None,
        "n": len(repeats),
    }
