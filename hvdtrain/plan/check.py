"""Predictions beside measurements: finished run folders, and what the calibration says that they should have taken."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.plan.calibration import Calibration
from hvdtrain.plan.predict import Question, row
from hvdtrain.plan.scenario import MODES
from hvdtrain.report.runs import Run, load_run

Row = dict[str, Any]
WARM_UP = 2  # steps that are not counted
LOCAL_GBIT = 1e4  # between processes of one host


def measured_step_s(run: Run) -> float:
    """Median seconds between two steps of a worker, over all workers.

    Raises:
        UsageError: there are too few steps.
    """
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
        bandwidth: of the hosts' links in Gbit/s; by default the calibration's.

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
    rate = LOCAL_GBIT if hosts == 1 else bandwidth or calibration.bandwidth_gbit
    if not rate:
        raise UsageError(f"{run.folder} ran on {hosts} hosts: say how fast their links are, --bandwidth 1gbit")
    batch = max(1, round((of.global_batch or calibration.batch_per_worker) / of.workers))
    question = Question(
        [mode], of.compression or "none", batch, placement, of.workers if hosts == 1 else per_host,
        staleness=2 if of.staleness_bound is None else of.staleness_bound,
    )  # fmt: skip
    return question, rate


def _compare(calibration: Calibration, run: Run, bandwidth: float | None) -> Row:
    question, rate = asked(calibration, run, bandwidth)
    mode, workers, servers, _ = run.kind
    predicted = row(calibration, question, mode, workers, servers, rate)
    measured = measured_step_s(run)
    return {
        "run": str(run.folder), "mode": mode, "workers": workers, "servers": servers, "hosts": hosts_of(run)[0],
        "bandwidth_gbit": None if rate == LOCAL_GBIT else rate, "measured_step_s": measured,
        "predicted_step_s": predicted["step_s"], "low": predicted["step_s_low"], "high": predicted["step_s_high"],
        "error": predicted["step_s"] / measured - 1,
    }  # fmt: skip


def errors_by_mode(rows: Sequence[Row]) -> dict[str, tuple[float, float, int]]:
    """Of each mode the median and the largest absolute error, and of how many runs."""
    found = {}
    for mode in dict.fromkeys(one["mode"] for one in rows):
        off = sorted(abs(one["error"]) for one in rows if one["mode"] == mode)
        found[mode] = statistics.median(off), off[-1], len(off)
    return found
