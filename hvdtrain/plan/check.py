"""Predictions beside measurements: finished run folders, and what the calibration says that they should have taken."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click

from hvdtrain import modes
from hvdtrain.errors import UsageError
from hvdtrain.plan.calibration import Calibration
from hvdtrain.plan.predict import Question, row
from hvdtrain.plan.scenario import MODES, Slow
from hvdtrain.plan.show import between, rate, seconds
from hvdtrain.plan.units import Stragglers
from hvdtrain.report.table import Cell, Table
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run, load_run

Row = dict[str, Any]
WARM_UP = 2  # steps that are not counted
LOCAL_GBIT = 1e4  # between processes of one host


def measured_step_s(run: Run) -> float:
    """Wall seconds for one step of the job. Of lockstep modes the median between two steps of a worker, the mean over
    workers; where each goes at its own pace, and some wait at the end for others, of all steps together.

    Raises:
        UsageError: there are too few steps.
    """
    if not modes.declared(run.kind.mode).lockstep and run.summary.steps and run.summary.wall_s:
        return run.summary.wall_s / run.summary.steps
    ranks, _ = run.read_steps()
    medians = []
    for steps in ranks.values():
        ends = [step.time for step in steps[WARM_UP - 1 :]]
        if len(ends) > 1:
            medians.append(statistics.median(b - a for a, b in itertools.pairwise(ends)))
    if not medians:
        raise UsageError(f"{run.folder} has too few steps to measure one: at least {WARM_UP + 1} are needed")
    return statistics.fmean(medians)


def hosts_of(run: Run) -> tuple[int, str, int]:
    """How many hosts it ran on, where its servers were, and how many workers a host had at most."""
    hosts, servers = run.manifest.hosts, run.kind.servers
    ranks = [host.ranks for host in hosts.values()]
    beside = any(min(own) < servers <= max(own) for own in ranks if own)
    per_host = max([sum(rank >= servers for rank in own) for own in ranks] or [run.kind.workers])
    return max(1, len(hosts)), "shared" if beside or len(hosts) <= 1 else "dedicated", max(1, per_host)


def compare(calibration: Calibration, folders: Sequence[Path], bandwidth: float | None) -> list[Row]:
    """A row for each run: what was measured, what is predicted, and the error.

    Args:
        bandwidth: of the hosts' links in Gbit/s; by default what the run measured of them, else the calibration's.

    Raises:
        UsageError: a run has not finished, or is of another model, or its hosts' links are not known.
    """
    found = []
    for folder in folders:
        run = load_run(folder)
        if run.problem:
            raise UsageError(f"{folder}: {run.problem}")
        found.append(_compare(calibration, run, bandwidth))
    return found


def asked(calibration: Calibration, run: Run, bandwidth: float | None) -> tuple[Question, float]:
    """What a run is a measurement of: a question with its one mode, and the bandwidth of its hosts in Gbit/s.

    Raises:
        UsageError: it is of another model, or nobody says how fast the links are.
    """
    of, mode = run.manifest, run.kind.mode
    if mode not in MODES:
        raise UsageError(f"{run.folder} is of mode {mode}, which cannot be predicted")
    known = calibration.model.get("parameters")
    if isinstance(known, int) and known and of.parameters and abs(of.parameters / known - 1) > 0.01:
        raise UsageError(
            f"{run.folder} has a model of {of.parameters:,} parameters, the calibration one of {known:,}: calibrate "
            "with its --model, --width and --dataset"
        )
    hosts, placement, per_host = hosts_of(run)
    measured = max((pair.gbit_s for pair in of.network.pairs), default=None)
    gbit = LOCAL_GBIT if hosts == 1 else bandwidth or measured or calibration.bandwidth_gbit
    if not gbit:
        raise UsageError(f"{run.folder} ran on {hosts} hosts: say how fast their links are, --bandwidth 1gbit")
    batch = max(1, round((of.global_batch or calibration.batch_per_worker) / of.workers))
    until_evaluated = next((row.step for row in run.summary.evaluations), run.summary.steps)
    question = Question(
        [mode], of.compression or "none", batch, placement, of.workers if hosts == 1 else per_host,
        staleness=2 if of.staleness_bound is None else of.staleness_bound, slow=_slow(run),
        softsync=of.push_scale == "softsync", leased=of.shares == "leased",
        round_steps=0 if modes.declared(mode).lockstep else until_evaluated or 0,
    )  # fmt: skip
    return question, gbit


def _slow(run: Run) -> Slow:
    """Who was made slow. UsageError where no prediction knows that: bursts, jitter."""
    try:
        return Stragglers().convert(field_value(run, "slow.asked"), None, None)
    except click.UsageError as error:
        raise UsageError(f"{run.folder} was run with --slow {error.message}") from None


def _compare(calibration: Calibration, run: Run, bandwidth: float | None) -> Row:
    question, gbit = asked(calibration, run, bandwidth)
    mode, workers, servers, _ = run.kind
    predicted = row(calibration, question, mode, workers, servers, gbit)
    measured = measured_step_s(run)
    return {
        "run": str(run.folder), "mode": mode, "workers": workers, "servers": servers, "hosts": hosts_of(run)[0],
        "bandwidth_gbit": None if gbit == LOCAL_GBIT else gbit, "measured_step_s": measured,
        "predicted_step_s": predicted["step_s"], "low": predicted["step_s_low"], "high": predicted["step_s_high"],
        "error": predicted["step_s"] / measured - 1,
    }  # fmt: skip


def table(calibration: Calibration, runs: Sequence[Run]) -> Table:
    """For a report: seconds a step of each kind of finished run, measured and predicted.

    A kind that cannot be predicted is not in it, but in a note, with the reason.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.is_finished:
            groups.setdefault((run.kind.label, field_value(run, "slow.asked")), []).append(run)
    several = len({slow for _, slow in groups}) > 1
    rows: list[tuple[str, list[Cell]]] = []
    found, notes = [], []
    for (label, slow), members in groups.items():
        words = label + (f", slow: {slow}" if several else "")
        try:
            own = _compare(calibration, members[0], None)
            measured = geometric_mean(map(measured_step_s, members))
        except UsageError as error:
            notes.append(f"Not predicted: {error}.")
            continue
        found.append(own | {"error": own["predicted_step_s"] / measured - 1})
        rows.append((words, [
            Cell(seconds(measured), measured),
            Cell(seconds(own["predicted_step_s"]), own["predicted_step_s"], between(own["low"], own["high"])),
            Cell(f"{found[-1]['error']:+.1%}", found[-1]["error"]),
        ]))  # fmt: skip
    for gbit in sorted({own["bandwidth_gbit"] for own in found if own["bandwidth_gbit"]}):
        notes.append(f"Hosts joined by {rate(gbit)}: measured by the runs, or else the calibration's.")
    for mode, (middle, largest, count) in errors_by_mode(found).items():
        notes.append(f"{mode}: median error {middle:.1%}, largest {largest:.1%}, of {count}.")
    made = ", ".join(f"{name} {value}" for name, value in calibration.model.items() if isinstance(value, str | int))
    notes.insert(0, f"Predicted by `hvdtrain plan` from a calibration ({made}); repeats as geometric means.")
    return Table("Predicted beside measured", notes, "run", ["a step, measured", "predicted", "error"], rows)


def errors_by_mode(rows: Sequence[Row]) -> dict[str, tuple[float, float, int]]:
    """Of each mode the median and the largest absolute error, and of how many runs."""
    found = {}
    for mode in dict.fromkeys(one["mode"] for one in rows):
        off = sorted(abs(one["error"]) for one in rows if one["mode"] == mode)
        found[mode] = statistics.median(off), off[-1], len(off)
    return found
