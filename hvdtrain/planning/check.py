"""Predictions beside measurements: what finished runs took, and what a calibration says of them."""

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

import click

from hvdtrain.base import modes
from hvdtrain.base.errors import UsageError
from hvdtrain.planning import predict
from hvdtrain.planning.calibration import Calibration
from hvdtrain.planning.predict import Row
from hvdtrain.planning.scenario import MODES, Scenario, Stragglers
from hvdtrain.planning.show import rate, seconds
from hvdtrain.planning.units import SlowRules
from hvdtrain.reporting.table import Cell, Table
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run, grouped, load_run

# Measured steps that are not counted.
WARM_UP = 2
# The bandwidth between processes of one host.
LOCAL_GBIT = 1e4


def finished(folder: Path) -> Run:
    """Returns a run.

    Raises:
        UsageError: it has not finished.
    """
    run = load_run(folder)
    if run.problem:
        raise UsageError(f"{folder}: {run.problem}")
    return run


def measured_step_s(run: Run) -> float:
    """Returns the wall seconds of a step of the job.

    For lockstep modes this is the median between two steps of a worker, or between two rounds of
    local steps, as the mean over workers. Where each worker goes at its own pace, it is the mean
    over all steps.

    Raises:
        UsageError: there are too few steps.
    """
    summary = run.summary
    in_lockstep = modes.declared(run.kind.mode).lockstep
    if not in_lockstep and summary.steps and summary.wall_s:
        return summary.wall_s / summary.steps
    steps_of_workers, _ = run.read_steps()
    every = run.local_steps
    first = -(-WARM_UP // every) * every - 1
    medians = []
    for steps in steps_of_workers.values():
        ends = [step.time for step in steps[first::every]]
        if len(ends) > 1:
            durations = [later - earlier for earlier, later in itertools.pairwise(ends)]
            medians.append(statistics.median(durations) / every)
    if not medians:
        least = max(WARM_UP + 1, 2 * every)
        raise UsageError(
            f"{run.folder} has too few steps to measure one: at least {least} are needed"
        )
    return statistics.fmean(medians)


def measured_gbit(runs: Sequence[Run]) -> float | None:
    """Returns the bandwidth of the fastest link between hosts that these runs measured.

    Often only one of the runs has measured links.
    """
    fastest: float | None = None
    for run in runs:
        for pair in run.manifest.network.pairs:
            fastest = max(fastest or 0.0, pair.gbit_s)
    return fastest


def job_of_run(
    calibration: Calibration, run: Run, bandwidth: float | None
) -> tuple[Calibration, Scenario]:
    """Returns what a run is a measurement of: the calibration with the run's batch, and the job.

    Args:
        bandwidth: of the links, in Gbit/s; None: what the run measured of them, else what the
            calibration has.

    Raises:
        UsageError: the run is of another model, or nobody says how fast the links are, or no
            prediction knows the run's mode, fragments or --slow (bursts, jitter).
    """
    manifest = run.manifest
    kind = run.kind
    if kind.mode not in MODES:
        raise UsageError(f"{run.folder} is of mode {kind.mode}, which cannot be predicted")
    if run.fragments > 1:
        raise UsageError(f"{run.folder} sends its weights in fragments, which no prediction knows")
    check_model(calibration, run)
    is_local = len(manifest.hosts) <= 1
    gbit = LOCAL_GBIT if is_local else _gbit_between_hosts(calibration, run, bandwidth)
    slow = _stragglers(run)
    batch_of_all = manifest.global_batch or calibration.batch_per_worker
    batch = max(1, round(batch_of_all / manifest.workers))
    round_steps = 0
    local_steps = run.local_steps
    if not modes.declared(kind.mode).lockstep:
        evaluated_at = (row.step for row in run.summary.evaluations)
        round_steps = next(evaluated_at, run.summary.steps) or 0
        local_steps = _mean_local_steps(local_steps, round_steps)
    threads = manifest.threads_per_worker or calibration.threads_per_worker
    has_more_threads = threads > calibration.threads_per_worker
    is_one_machine = kind.mode == "single" and has_more_threads and calibration.device == "cpu"
    if not is_one_machine:
        calibration = calibration.with_threads(threads)
    ranks_by_host = [host.ranks for host in manifest.hosts.values() if host.ranks]
    servers_are_beside = any(min(ranks) < kind.servers <= max(ranks) for ranks in ranks_by_host)
    workers_by_host = [sum(rank >= kind.servers for rank in ranks) for ranks in ranks_by_host]
    job = Scenario(
        kind.mode,
        workers=kind.workers,
        servers=kind.servers,
        bandwidth_gbit=gbit,
        compression=manifest.compression or "none",
        placement="shared" if servers_are_beside or is_local else "dedicated",
        workers_per_host=manifest.workers if is_local else max([1, *workers_by_host]),
        ranks_by_host=_placed_ranks(run, ranks_by_host),
        staleness=2 if manifest.staleness_bound is None else manifest.staleness_bound,
        slow=slow,
        softsync=manifest.push_scale == "softsync",
        shares=manifest.shares or "equal",
        wait_for=manifest.wait_for or "",
        local_steps=local_steps,
        wire=run.wire,
        replaces=int(is_one_machine),
        round_steps=round_steps,
    )
    return calibration.with_batch(batch), job


def _mean_local_steps(local_steps: int, until_evaluated: int) -> int:
    """Returns the mean number of local steps between two exchanges where shares are leased, rounded
    up.

    Before an evaluation workers exchange what they have, so that the last local steps may be fewer.

    Args:
        local_steps: the most between two exchanges.
        until_evaluated: steps; 0: there is no evaluation.
    """
    if not until_evaluated:
        return local_steps
    exchanges = math.ceil(until_evaluated / local_steps)
    return math.ceil(until_evaluated / exchanges)


def _placed_ranks(run: Run, ranks_by_host: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks on each host for Scenario.ranks_by_host; empty without servers, or if the run
    does not say it of all ranks.

    Args:
        ranks_by_host: as the run's manifest has them.
    """
    kind = run.kind
    ranks = sorted(itertools.chain(*ranks_by_host))
    is_whole = ranks == list(range(kind.workers + kind.servers))
    return tuple(map(tuple, ranks_by_host)) if kind.servers and is_whole else ()


def check_model(calibration: Calibration, run: Run) -> None:
    """Raises a UsageError if the run's model has another number of parameters."""
    known = calibration.model.get("parameters")
    parameters = run.manifest.parameters
    if not isinstance(known, int) or not known or not parameters:
        return
    if abs(parameters / known - 1) > 0.01:
        raise UsageError(
            f"{run.folder} has a model of {parameters:,} parameters, the calibration one of "
            f"{known:,}: calibrate with its --model, --width and --dataset"
        )


def _gbit_between_hosts(calibration: Calibration, run: Run, bandwidth: float | None) -> float:
    gbit = bandwidth or measured_gbit([run]) or calibration.bandwidth_gbit
    if not gbit:
        raise UsageError(
            f"{run.folder} ran on {len(run.manifest.hosts)} hosts, and how fast their links are is "
            "not known: hvdtrain plan calibrate --from takes it, with --bandwidth 1gbit"
        )
    return gbit


def _stragglers(run: Run) -> Stragglers:
    try:
        return SlowRules().convert(field_value(run, "slow.asked"), None, None)
    except click.UsageError as error:
        raise UsageError(f"{run.folder} was run with --slow {error.message}") from None


def compare(calibration: Calibration, run: Run, bandwidth: float | None) -> Row:
    """Returns what was measured, what is predicted, and the error.

    Raises:
        UsageError: see job_of_run.
    """
    of_run, job = job_of_run(calibration, run, bandwidth)
    predicted = predict.row(of_run, job)
    measured = measured_step_s(run)
    return {
        "run": str(run.folder),
        "mode": job.mode,
        "workers": job.workers,
        "servers": job.servers,
        "hosts": max(1, len(run.manifest.hosts)),
        "bandwidth_gbit": None if job.bandwidth_gbit == LOCAL_GBIT else job.bandwidth_gbit,
        "measured_step_s": measured,
        "predicted_step_s": predicted["step_s"],
        "low": predicted["step_s_low"],
        "high": predicted["step_s_high"],
        "error": predicted["step_s"] / measured - 1,
    }


def table(calibration: Calibration, runs: Sequence[Run]) -> Table:
    """Returns a report's table: seconds a step of each kind of finished run, measured and
    predicted.

    A kind that cannot be predicted is a note with the reason.
    """
    finished_runs = (run for run in runs if run.is_finished)
    groups = grouped(finished_runs, lambda run: (run.kind.label, field_value(run, "slow.asked")))
    has_several_slow = len({slow for _, slow in groups}) > 1
    model = ", ".join(
        f"{name} {value}"
        for name, value in calibration.model.items()
        if isinstance(value, str | int)
    )
    notes = [
        f"Predicted by `hvdtrain plan` from a calibration ({model}); repeats as geometric means."
    ]
    if calibration.others_share:
        notes.append(
            f"The machine did other work while it was calibrated: {calibration.others_share:.0%} of it."
        )
    rows: list[tuple[str, list[Cell]]] = []
    errors: list[float] = []
    links: set[float] = set()
    for (label, slow), members in groups.items():
        try:
            measured_s = geometric_mean(map(measured_step_s, members))
            row = compare(calibration, members[0], measured_gbit(members) or measured_gbit(runs))
        except UsageError as error:
            notes.append(f"Not predicted: {error}.")
            continue
        if row["bandwidth_gbit"] is not None:
            links.add(row["bandwidth_gbit"])
        error_of_kind = row["predicted_step_s"] / measured_s - 1
        errors.append(error_of_kind)
        if has_several_slow:
            label += f", slow: {slow}"
        rows.append((label, _cells(measured_s, row, error_of_kind)))
    for gbit in sorted(links):
        notes.append(
            f"Hosts joined by {rate(gbit)}: measured by the runs, or else the calibration's."
        )
    if errors:
        sizes = [abs(error) for error in errors]
        notes.append(f"Median error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}.")
    headings = ["a step, measured", "predicted", "error"]
    return Table("Predicted beside measured", notes, "run", headings, rows)


def _cells(measured_s: float, row: Row, error: float) -> list[Cell]:
    predicted_s = row["predicted_step_s"]
    interval = f"{seconds(row['low'])} to {seconds(row['high'])}"
    return [
        Cell(seconds(measured_s), measured_s),
        Cell(seconds(predicted_s), predicted_s, interval),
        Cell(f"{error:+.1%}", error),
    ]
