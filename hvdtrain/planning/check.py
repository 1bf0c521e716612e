"""Predictions beside measurements: finished run folders, and what the calibration says that they should have taken."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

import click

from hvdtrain import modes
from hvdtrain.errors import UsageError
from hvdtrain.planning import predict
from hvdtrain.planning.calibration import Calibration
from hvdtrain.planning.predict import Row
from hvdtrain.planning.scenario import MODES, Scenario
from hvdtrain.planning.show import rate, seconds
from hvdtrain.planning.units import Stragglers
from hvdtrain.report.table import Cell, Table
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run, grouped, load_run

WARM_UP = 2  # steps that are not counted
LOCAL_GBIT = 1e4  # between processes of one host


def finished(folder: Path) -> Run:
    """The run. UsageError where it has not finished."""
    run = load_run(folder)
    if run.problem:
        raise UsageError(f"{folder}: {run.problem}")
    return run


def measured_step_s(run: Run) -> float:
    """Wall seconds for one step of the job. Of lockstep modes the median between two steps of a worker, or two rounds
    of local steps, the mean over workers; where each goes at its own pace, of all steps together. UsageError where
    there are too few.
    """
    if not modes.declared(run.kind.mode).lockstep and run.summary.steps and run.summary.wall_s:
        return run.summary.wall_s / run.summary.steps
    ranks, _ = run.read_steps()
    medians, every = [], run.local_steps
    for steps in ranks.values():
        ends = [step.time for step in steps[-(-WARM_UP // every) * every - 1 :: every]]
        if len(ends) > 1:
            medians.append(statistics.median(b - a for a, b in itertools.pairwise(ends)) / every)
    if not medians:
        least = max(WARM_UP + 1, 2 * every)
        raise UsageError(f"{run.folder} has too few steps to measure one: at least {least} are needed")
    return statistics.fmean(medians)


def measured_gbit(runs: Sequence[Run]) -> float | None:
    """Of the fastest link between hosts that these runs measured: often one of them alone has."""
    return max((pair.gbit_s for run in runs for pair in run.manifest.network.pairs), default=None)


def question(calibration: Calibration, run: Run, bandwidth: float | None) -> tuple[Calibration, Scenario]:
    """What a run is a measurement of: the calibration with its batch, and the scenario to ask about. Links have so many
    Gbit/s, by default what the run measured of them, else the calibration's.

    Raises:
        UsageError: the run is of another model, or nobody says how fast the links are, or no prediction knows its mode,
            its fragments or its --slow: bursts, jitter.
    """
    manifest, kind, hosts = run.manifest, run.kind, run.manifest.hosts
    is_local, is_machine = len(hosts) <= 1, kind.family == modes.ONE_MACHINE
    if kind.mode not in MODES:
        raise UsageError(f"{run.folder} is of mode {kind.mode}, which cannot be predicted")
    if run.fragments > 1:
        raise UsageError(f"{run.folder} sends its weights in fragments, which no prediction knows")
    known = calibration.model.get("parameters")
    if isinstance(known, int) and known and manifest.parameters and abs(manifest.parameters / known - 1) > 0.01:
        raise UsageError(
            f"{run.folder} has a model of {manifest.parameters:,} parameters, the calibration one of {known:,}: "
            "calibrate with its --model, --width and --dataset"
        )
    gbit = LOCAL_GBIT if is_local else bandwidth or measured_gbit([run]) or calibration.bandwidth_gbit
    if not gbit:
        raise UsageError(f"{run.folder} ran on {len(hosts)} hosts: say how fast their links are, --bandwidth 1gbit")
    try:
        slow = Stragglers().convert(field_value(run, "slow.asked"), None, None)
    except click.UsageError as error:
        raise UsageError(f"{run.folder} was run with --slow {error.message}") from None
    batch = max(1, round((manifest.global_batch or calibration.batch_per_worker) / manifest.workers))
    until_evaluated = next((row.step for row in run.summary.evaluations), run.summary.steps)
    ranks = [host.ranks for host in hosts.values() if host.ranks]
    is_beside = any(min(on_host) < kind.servers <= max(on_host) for on_host in ranks)
    workers_on_hosts = [sum(rank >= kind.servers for rank in on_host) for on_host in ranks]
    return calibration.with_batch(batch), Scenario(
        kind.mode, workers=kind.workers, servers=kind.servers, bandwidth_gbit=gbit,
        compression=manifest.compression or "none", placement="shared" if is_beside or is_local else "dedicated",
        workers_per_host=manifest.workers if is_local else max([1, *workers_on_hosts]),
        staleness=2 if manifest.staleness_bound is None else manifest.staleness_bound, slow=slow,
        softsync=manifest.push_scale == "softsync", shares=manifest.shares or "equal",
        wait_for=manifest.wait_for or "", local_steps=run.local_steps,
        wire=run.wire,
        replaces=int(is_machine and manifest.threads_per_worker != calibration.threads_per_worker),
        round_steps=0 if modes.declared(kind.mode).lockstep else until_evaluated or 0,
    )  # fmt: skip


def compare(calibration: Calibration, run: Run, bandwidth: float | None) -> Row:
    """What was measured, what is predicted, and the error. UsageError as of `question`."""
    made, asked = question(calibration, run, bandwidth)
    predicted, measured = predict.row(made, asked), measured_step_s(run)
    return {
        "run": str(run.folder), "mode": asked.mode, "workers": asked.workers, "servers": asked.servers,
        "hosts": max(1, len(run.manifest.hosts)),
        "bandwidth_gbit": None if asked.bandwidth_gbit == LOCAL_GBIT else asked.bandwidth_gbit,
        "measured_step_s": measured, "predicted_step_s": predicted["step_s"], "low": predicted["step_s_low"],
        "high": predicted["step_s_high"], "error": predicted["step_s"] / measured - 1,
    }  # fmt: skip


def table(calibration: Calibration, runs: Sequence[Run]) -> Table:
    """For a report: seconds a step of each kind of finished run, measured and predicted, or a note of why not."""
    finished = (run for run in runs if run.is_finished)
    groups = grouped(finished, lambda run: (run.kind.label, field_value(run, "slow.asked")))
    several = len({slow for _, slow in groups}) > 1
    made = ", ".join(f"{name} {value}" for name, value in calibration.model.items() if isinstance(value, str | int))
    notes = [f"Predicted by `hvdtrain plan` from a calibration ({made}); repeats as geometric means."]
    rows: list[tuple[str, list[Cell]]] = []
    off, links = [], set[float]()
    for (label, slow), members in groups.items():
        try:
            measured = geometric_mean(map(measured_step_s, members))
            row = compare(calibration, members[0], measured_gbit(members) or measured_gbit(runs))
        except UsageError as error:
            notes.append(f"Not predicted: {error}.")
            continue
        predicted = row["predicted_step_s"]
        links |= {row["bandwidth_gbit"]} - {None}
        off.append(predicted / measured - 1)
        rows.append((label + (f", slow: {slow}" if several else ""), [
            Cell(seconds(measured), measured),
            Cell(seconds(predicted), predicted, f"{seconds(row['low'])} to {seconds(row['high'])}"),
            Cell(f"{off[-1]:+.1%}", off[-1]),
        ]))  # fmt: skip
    for gbit in sorted(links):
        notes.append(f"Hosts joined by {rate(gbit)}: measured by the runs, or else the calibration's.")
    if off:
        notes.append(f"Median error {statistics.median(map(abs, off)):.1%}, largest {max(map(abs, off)):.1%}.")
    return Table("Predicted beside measured", notes, "run", ["a step, measured", "predicted", "error"], rows)
