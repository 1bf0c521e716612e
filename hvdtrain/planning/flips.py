"""Where the answer of a comparison flips, foretold from its own runs: see README.md, "Where it flips"."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from hvdtrain import modes
from hvdtrain.errors import UsageError
from hvdtrain.planning import best
from hvdtrain.planning.calibrate import UNKNOWN
from hvdtrain.planning.calibration import LEAST_CORES, Calibration, LayerCost, Quantity
from hvdtrain.planning.check import LOCAL_GBIT, measured_gbit, measured_step_s, question
from hvdtrain.planning.from_runs import from_runs, scenario_of
from hvdtrain.planning.layout import ROUGH
from hvdtrain.planning.predict import Row, simulate
from hvdtrain.planning.probe import OF_KIND
from hvdtrain.planning.scenario import Scenario, Slow
from hvdtrain.planning.show import ANSWERS, answer, map_table, rate
from hvdtrain.report.table import Table
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Kind, Run, finished_by_kind

LAYERS, LEAST_ERROR = 6, 0.1  # the simulation misses more where it knows so little of a model
OPTIMIZER_MS_PER_MB = Quantity(0.5, 0.2, 1.5)  # where no run of one process tells
SURE = 0.9
ONE_RUN = 1.1  # what a figure of one may be off by
BANDWIDTHS, WORKERS = (0.1, 1.0, 10.0), (2, 4, 16)
USUAL_GBIT = 1.0  # of what is asked about where all ran on one host
SLOW, BATCHES, LOCAL_STEPS = (1.5, 3.0), (8,), (8, 64)
MOST_WORKERS, MOST_S, MOST_MB = 64, 1e4, 1e5  # of runs: no more is asked about


def flips(runs: Sequence[Run], word: str) -> dict[str, Any]:
    """Of verdict.json: `says`, a sentence, and the `map`, as `hvdtrain plan predict` has it, with the `measured` place:
    these runs, and the word of their answer.
    """
    try:
        chosen = _middle_ones(runs)
        made, asked = _calibrated(chosen, measured_gbit(runs))
        names = [kind.mode for kind in chosen if kind.is_distributed]
        return _where(made, asked, names) | {"measured": {"workers": asked.workers, "answer": word}}
    except (UsageError, ValueError, ArithmeticError) as error:
        return {"says": f"not foretold: {error}", "map": []}


def table(found: dict[str, Any]) -> Table | None:
    """The map, and what was measured."""
    if not found["map"]:
        return None
    title = "Where it flips; measured with {workers} workers: {answer}".format(**found["measured"])
    return map_table(found["map"], title)


def _middle_ones(runs: Sequence[Run]) -> dict[Kind, Run]:
    """Of each kind, the run of middle speed."""
    chosen = {}
    for kind, of in finished_by_kind(runs).items():
        timed = [run for run in of if kind.family and run.summary.samples_per_s]
        timed.sort(key=lambda run: run.summary.samples_per_s or 0.0)
        if timed:
            chosen[kind] = timed[(len(timed) - 1) // 2]
    distributed = [run for kind, run in chosen.items() if kind.is_distributed]
    if not distributed:
        raise UsageError("nothing here is distributed")
    if slow := next((run for run in distributed if field_value(run, "slow.asked") != "none"), None):
        raise UsageError(f"{slow.name} was run with --slow {field_value(slow, 'slow.asked')}")
    if max(run.kind.workers for run in distributed) > MOST_WORKERS:
        raise UsageError(f"there are more than {MOST_WORKERS} workers")
    return chosen


def _calibrated(chosen: dict[Kind, Run], bandwidth: float | None) -> tuple[Calibration, Scenario]:
    """What the runs say of costs, and the largest cluster that they had."""
    kind, run = max(chosen.items(), key=lambda one: (one[0].family == modes.RING, one[0].workers))
    manifest, seconds = run.manifest, run.summary.step_seconds
    megabytes = 4e-6 * (manifest.trained_parameters or manifest.parameters or 0)
    forward, backward, other = (seconds.get(name, 0.0) for name in ("forward", "backward", "data"))
    if not (0 < forward + backward < MOST_S and 0 < megabytes < MOST_MB and other < MOST_S and manifest.global_batch):
        raise UsageError(f"{run.name} does not say what a step computes")
    forward_ms, backward_ms, other_ms = (
        Quantity.exactly(1e3 * figure).give_or_take(ONE_RUN) for figure in (forward / LAYERS, backward / LAYERS, other)
    )
    layer = LayerCost("part", megabytes / LAYERS, forward_ms, backward_ms)
    made = Calibration(
        {"name": manifest.model or ""}, max(1, manifest.global_batch // kind.workers), (layer,) * LAYERS,
        other_ms, OPTIMIZER_MS_PER_MB, dict.fromkeys(OF_KIND, UNKNOWN),
        cores_per_host=max(LEAST_CORES, manifest.hardware.cores_usable or 1.0),
        threads_per_worker=manifest.threads_per_worker or 1,
        device="cuda" if (manifest.device or "").startswith("cuda") else "cpu", most_workers=kind.workers,
    )  # fmt: skip
    is_local = len(manifest.hosts) <= 1
    used = [one for one in chosen.values() if not is_local or one.kind.family == modes.ONE_MACHINE]
    made = from_runs(made, used, bandwidth)
    distributed = [one for of, one in chosen.items() if of.is_distributed]
    jobs = [(scenario_of(made, one, bandwidth), measured_step_s(one)) for one in distributed]
    missed = [math.log(simulate(job).step_s / step_s) for job, step_s in jobs]
    made = replace(made, model_error=min(10.0, max(LEAST_ERROR, math.sqrt(fmean(log**2 for log in missed)))))
    _, asked = question(made, run, bandwidth)
    gbit = USUAL_GBIT if asked.bandwidth_gbit == LOCAL_GBIT else asked.bandwidth_gbit
    per_host = 1 if is_local else asked.workers_per_host
    return made, Scenario("single", workers=max(2, kind.workers), bandwidth_gbit=gbit, workers_per_host=per_host)


def _where(made: Calibration, asked: Scenario, names: Sequence[str]) -> dict[str, Any]:
    """The map, and what turns the answer at the measured place of it."""

    def place(made: Calibration = made, n: int = asked.workers, **changed: Any) -> Row:
        contest = best.Contest(made, replace(asked, **changed), names)
        return contest.place(-(-n // asked.workers_per_host), detail=ROUGH)

    rates, sizes = sorted({*BANDWIDTHS, asked.bandwidth_gbit}), sorted({*WORKERS, asked.workers})
    map_ = [place(n=n, bandwidth_gbit=gbit) for n in sizes if n > asked.workers_per_host for gbit in rates]
    here = place()
    first, gbit, n = _answer(here), asked.bandwidth_gbit, here["workers"]
    batches = [made.batch_per_worker * times for times in BATCHES]
    tried = [
        *(("at", rate(of["bandwidth_gbit"]), of) for of in map_ if of["workers"] == n),
        *(("on", f"{of['hosts']} machines", of) for of in map_ if of["workers"] > n and of["bandwidth_gbit"] == gbit),
        *(("where", f"a worker is {times:g} times slower", place(slow=Slow({1: times}))) for times in SLOW),
        *(("with a batch of", f"{n * batch:,}", place(made.with_batch(batch))) for batch in batches),
        *(("with", f"{steps} local steps", place(local_steps=steps)) for steps in LOCAL_STEPS),
    ]
    told: dict[tuple[str, str], str] = {}
    for kind, where, of in tried:
        if _answer(of) not in (first, ""):
            told.setdefault((kind, _answer(of)), f"{_answer(of)} {kind} {where}")
    sure = f"{first} (P {max(here[key] for key in ANSWERS):.2f})" if first else f"not sure ({answer(here)})"
    turns = "; ".join(told.values()) or "nothing that was tried turns that surely"
    if made.model_error > 2 * LEAST_ERROR:
        turns += f" (the model misses these runs by a factor of {math.exp(made.model_error):.1f})"
    return {"says": f"on {here['hosts']} machines at {rate(gbit)} {sure}; {turns}", "map": map_, "here": here}


def _answer(place: dict[str, Any]) -> str:
    """The sure one, or empty."""
    return next((name for key, name in ANSWERS.items() if place[key] >= SURE), "")
