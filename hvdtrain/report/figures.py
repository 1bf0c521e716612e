"""The figures of an answer: what stands in its table, in its sentences and in verdict.json, where all of them are."""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from statistics import fmean, geometric_mean
from typing import Any

from hvdtrain import modes
from hvdtrain.formatting import three_digits
from hvdtrain.report import rule
from hvdtrain.report.columns import busiest_share, cpu_s_per_1000_samples, format_figure
from hvdtrain.report.contenders import Field, Figure, Sides, speed, timed, whole
from hvdtrain.report.quality import trained
from hvdtrain.report.race import Race
from hvdtrain.report.rule import Lead
from hvdtrain.report.table import Cell, Table
from hvdtrain.runs.read import Kind, Run

RESAMPLED = 2000  # times, of the interval of a ratio of times
accuracy: Figure = attrgetter("summary.val_accuracy")


def ratio(logs: Lead) -> tuple[float, float | None, float | None]:
    """The geometric mean of ratios and its interval, which one repeat does not have."""
    mean, low, high = (math.exp(min(max(float(x), -700.0), 700.0)) for x in logs[:3])
    return (mean, low, high) if logs.n > 1 else (mean, None, None)


def times(value: float) -> str:
    """`1.28`."""
    return f"{value:.2f}" if 0.1 <= value < 1000 else f"{value:.2g}"


def race_data(race: Race | None) -> dict[str, Any] | None:
    """Of verdict.json: `run` over `beside`."""
    if not race:
        return None
    over, low, high = ratio(race.lead)
    confidence = 1 - rule.look_at(race.lead.n)[1]
    names = {"run": race.one.label, "beside": race.other.label}
    return names | {"ratio": over, "ci_low": low, "ci_high": high, "n": race.lead.n, "confidence": confidence}


def difference_data(lead: Lead | None) -> dict[str, Any]:
    """The mean with its interval, which one repeat does not have."""
    if not lead:
        return {"difference": None, "ci_low": None, "ci_high": None, "n": 0}
    low, high = map(float, lead[1:3]) if lead.n > 1 else (None, None)
    return {"difference": float(lead.mean), "ci_low": low, "ci_high": high, "n": lead.n}


def mean(runs: Sequence[Run], figure: Figure) -> float | None:
    """Over the runs that have it; NaN where one of them is."""
    values = [value for run in runs if (value := figure(run)) is not None]
    return fmean(values) if values else None


def reference(field: Field, of: Sides) -> Kind:
    """Whose speed is 1: the fastest ring's, else that of the first kind that is distributed, else of any."""
    if of.rings:
        return max(of.rings, key=lambda kind: mean(timed(field.by_kind[kind]), speed) or 0.0)
    return [*of.distributed, *of.machines, *field.by_kind][0]


def rows(field: Field, reference: Kind) -> list[dict[str, Any]]:
    """Of verdict.json: what is known of each kind that is no baseline, beside the reference too; a machine is last."""
    kinds = [kind for kind in field.by_kind if kind.family] or list(field.by_kind)
    kinds.sort(key=lambda kind: kind.family == modes.ONE_MACHINE)
    told = []
    for kind in kinds:
        runs, fast = field.by_kind[kind], timed(field.by_kind[kind])
        speeds = [value for run in fast if (value := speed(run))]
        logs = field.log_ratios(kind, reference) if kind != reference else [0.0]
        over, low, high = ratio(rule.at_look(logs))
        told.append({
            "run": kind.label, "mode": kind.mode, "family": kind.family, "n": len(fast), "trainings": len(whole(runs)),
            "samples_per_s": geometric_mean(speeds) if speeds else None,
            "least": min(speeds, default=None), "most": max(speeds, default=None),
            "ratio": over if logs else None, "ci_low": low, "ci_high": high, "ratios": [math.exp(log) for log in logs],
            "accuracy": mean(trained(field, kind), accuracy), "to_target": expected_time(runs),
            "cpu_s_per_1000_samples": mean(fast, cpu_s_per_1000_samples), "busiest_share": mean(fast, busiest_share),
        })  # fmt: skip
    return told


def table(data: Mapping[str, Any]) -> Table:
    """The table of an answer, from verdict.json."""
    target = data["target"]
    headings = ["samples/s", f"× {data['beside']}", "accuracy"]
    if target:
        headings.append(f"to {target:g}")
    headings += ["CPU/1,000", "busiest"]
    return Table("", [], "", headings, [(of["run"], _cells(of, bool(target))) for of in data["runs"]])


def _cells(of: Mapping[str, Any], has_target: bool) -> list[Cell]:
    def cell(column: str, value: float | None, detail: str = "") -> Cell:
        return Cell(format_figure(column, value), value, detail)

    least, most, got = of["least"], of["most"], of["to_target"]
    spread = f"{three_digits(least)}–{three_digits(most)}" if of["n"] > 1 and least is not None else ""
    some = "" if got["reached"] == got["n"] else f"{got['reached']} of {got['n']}"
    to_target = cell("time_to_target_s", got["seconds"], some) if got["reached"] else Cell(some or "–")
    return [
        cell("samples_per_s", of["samples_per_s"], spread),
        Cell("" if of["ratio"] is None else times(of["ratio"]), of["ratio"]),
        cell("val_accuracy", of["accuracy"]),
        *([to_target] if has_target else []),
        *(cell(column, of[column]) for column in ("cpu_s_per_1000_samples", "busiest_share")),
    ]


# The time to the target accuracy, also where not every training gets there


def _spent(run: Run) -> tuple[float, bool]:
    """Seconds of training until it reached the target, or until its end; and whether it did."""
    reached = run.summary.time_to_target_s
    return (run.summary.wall_s or 0.0, False) if reached is None else (reached, True)


def expected_time(runs: Sequence[Run]) -> dict[str, Any]:
    """All time spent over the trainings that got there, the expected running time of COCO's benchmarks; seconds are
    None where none did.
    """
    spent = [_spent(run) for run in whole(runs)]
    reached = sum(got for _, got in spent)
    seconds = sum(seconds for seconds, _ in spent) / reached if reached else None
    return {"seconds": seconds, "reached": reached, "n": len(spent)}


def ratio_of_times(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, Any] | None:
    """The ratio of expected times over the repeats that both have, with a 95 % interval of a bootstrap over these
    pairs; its ends are None where they are infinite. None where one of them never got there.
    """
    import numpy as np

    first, second = ({run.manifest.repeat: _spent(run) for run in whole(of)} for of in (runs, others))
    repeats = sorted(first.keys() & second.keys())
    pairs = np.array([[first[repeat], second[repeat]] for repeat in repeats], dtype=float)  # [n, side, (s, reached)]
    if not repeats or not pairs[:, :, 1].sum(0).all():
        return None
    drawn = np.random.default_rng(0).integers(0, len(repeats), (RESAMPLED, len(repeats)))
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.concatenate([pairs.sum(0)[None], pairs[drawn].sum(1)])
        each = total[:, :, 0] / total[:, :, 1]
        ratios = each[:, 0] / each[:, 1]
    low, high = np.nanquantile(ratios[1:], [0.025, 0.975], method="nearest") if len(repeats) > 1 else (math.nan,) * 2
    ends = [float(end) if math.isfinite(end) else None for end in (low, high)]
    return {"ratio": float(ratios[0]), "ci_low": ends[0], "ci_high": ends[1], "n": len(repeats)}
