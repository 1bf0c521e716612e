"""The figures of an answer, as verdict.json has them and as the answer's table shows them."""

import math
from collections.abc import Mapping, Sequence
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
    only_trainings,
    speed,
    speed_runs,
)
from hvdtrain.reporting.quality import trained
from hvdtrain.reporting.race import Race
from hvdtrain.reporting.rule import Lead
from hvdtrain.reporting.table import Cell, Table
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
    """Returns the ends of the interval of a ratio; None for both with fewer than two repeats."""
    if lead.n < 2:
        return None, None
    return _exp(lead.low), _exp(lead.high)


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
    """Returns the kind that all speeds are divided by.

    It is the fastest ring. Without rings it is the first distributed kind, else the first of any.
    """
    if sides.rings:
        by_kind = contenders.by_kind
        return max(sides.rings, key=lambda kind: mean(speed_runs(by_kind[kind]), speed) or 0.0)
    return [*sides.distributed, *sides.machines, *contenders.by_kind][0]


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
    logs = contenders.log_ratios(kind, reference) if kind != reference else [0.0]
    lead = rule.estimate_lead(logs)
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
        "ratio": mean_ratio(lead) if logs else None,
        "ci_low": low,
        "ci_high": high,
        "ratios": [math.exp(log) for log in logs],
        "accuracy": mean(trained(contenders, kind), accuracy),
        "to_target": expected_time(runs),
        "cpu_s_per_1000_samples": mean(timed, cpu_s_per_1000_samples),
        "busiest_share": mean(timed, busiest_share),
    }


def table(data: Mapping[str, Any]) -> Table:
    """Returns the table of an answer, from verdict.json."""
    target = data["target"]
    headings = ["samples/s", f"× {data['beside']}", "accuracy"]
    if target:
        headings.append(f"to {target:g}")
    headings += ["CPU/1,000", "busiest"]
    lines = [(row["run"], _cells(row, bool(target))) for row in data["runs"]]
    return Table("", [], "", headings, lines)


def _cells(row: Mapping[str, Any], has_target: bool) -> list[Cell]:
    """Returns the cells of a row of verdict.json."""
    spread = ""
    if row["n"] > 1 and row["least"] is not None:
        spread = f"{three_digits(row['least'])}–{three_digits(row['most'])}"
    ratio = row["ratio"]
    cells = [
        _cell("samples_per_s", row["samples_per_s"], spread),
        Cell("" if ratio is None else format_ratio(ratio), ratio),
        _cell("val_accuracy", row["accuracy"]),
    ]
    if has_target:
        cells.append(_target_cell(row["to_target"]))
    for column in ("cpu_s_per_1000_samples", "busiest_share"):
        cells.append(_cell(column, row[column]))
    return cells


def _cell(column: str, value: float | None, detail: str = "") -> Cell:
    return Cell(format_figure(column, value), value, detail)


def _target_cell(to_target: Mapping[str, Any]) -> Cell:
    """Returns the time to the target, and how many trainings got there if not all did."""
    reached = to_target["reached"]
    some = "" if reached == to_target["n"] else f"{reached} of {to_target['n']}"
    if not reached:
        return Cell(some or "–")
    return _cell("time_to_target_s", to_target["seconds"], some)


def target_accuracy(contenders: Contenders) -> float | None:
    """Returns the accuracy whose time is told; None if no training has a target."""
    for runs in contenders.by_kind.values():
        for run in only_trainings(runs):
            if run.summary.target_accuracy:
                return run.summary.target_accuracy
    return None


# The time to the target accuracy, also where not every training reaches it


def _time_spent(run: Run) -> tuple[float, bool]:
    """Returns the seconds of training to the target, or to the run's end if it was not reached.

    The second value says whether the target was reached.
    """
    to_target_s = run.summary.time_to_target_s
    if to_target_s is None:
        return run.summary.wall_s or 0.0, False
    return to_target_s, True


def expected_time(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the expected time to the target for verdict.json.

    That is the time of all trainings over the number that reached the target: the expected running
    time of the COCO benchmarks. The seconds are None if none did.
    """
    spent = [_time_spent(run) for run in only_trainings(runs)]
    total_s = sum(seconds for seconds, _ in spent)
    reached = sum(has_reached for _, has_reached in spent)
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

    spent = {run.manifest.repeat: _time_spent(run) for run in only_trainings(runs)}
    spent_by_others = {run.manifest.repeat: _time_spent(run) for run in only_trainings(others)}
    repeats = sorted(spent.keys() & spent_by_others.keys())
    # [pairs, 2 kinds, (seconds, has reached)]
    pairs = np.array([[spent[repeat], spent_by_others[repeat]] for repeat in repeats], dtype=float)
    if not repeats or not pairs[:, :, 1].sum(0).all():
        return None
    drawn = np.random.default_rng(0).integers(0, len(repeats), (RESAMPLES, len(repeats)))
    with np.errstate(divide="ignore", invalid="ignore"):
        # The first of the totals is of the pairs as they are.
        totals = np.concatenate([pairs.sum(0)[None], pairs[drawn].sum(1)])
        expected = totals[:, :, 0] / totals[:, :, 1]
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
