"""Where the answer of a comparison flips, predicted from the comparison's own runs.

See README.md, "Where the answer would change".
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from hvdtrain.base import modes
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.load import others_share
from hvdtrain.planning import best, parallel
from hvdtrain.planning.calibration import Calibration
from hvdtrain.planning.check import LOCAL_GBIT, job_of_run, measured_gbit, measured_step_s
from hvdtrain.planning.equal_layers import of_equal_layers
from hvdtrain.planning.from_runs import from_runs, scenario_of
from hvdtrain.planning.layout import ROUGH
from hvdtrain.planning.one_host import (
    InRun,
    computing_of_all,
    disturbed_hosts,
    in_run,
    with_computing,
)
from hvdtrain.planning.predict import Row, simulate
from hvdtrain.planning.scenario import Scenario, Stragglers
from hvdtrain.planning.show import ANSWERS, OTHER_WORK, answer, map_table, rate
from hvdtrain.reporting.table import Table
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Kind, Run, finished_by_kind

# The simulation misses more where it knows so little of a model.
LEAST_ERROR = 0.1
MOST_ERROR = 10.0
# The probability from which on an answer is named.
SURE = 0.9
# A model that misses the runs of the report by a larger factor says nothing of probabilities.
MOST_MISSED = 1.3
# What is asked about, beside what was measured: bandwidths in Gbit/s, numbers of workers, factors
# of a straggler and of the batch, and numbers of local steps.
BANDWIDTHS = (0.1, 1.0, 10.0)
WORKERS = (2, 4, 16)
SLOW = (1.5, 3.0)
BATCHES = (8,)
LOCAL_STEPS = (8, 64)
# The bandwidth that is asked about where all runs were on one host.
USUAL_GBIT = 1.0
# Runs with more workers are not asked about.
MOST_WORKERS = 64


@dataclass(frozen=True)
class CostModel:
    """What the runs of a comparison say of costs.

    Attributes:
        largest: the largest cluster that was measured.
        mode_names: the modes of the distributed runs.
        missed: of each distributed run the logarithm of the simulated step over the measured one.
    """

    calibration: Calibration
    largest: Scenario
    mode_names: Sequence[str]
    missed: Sequence[float]

    def place(self, workers: int = 0, **changed: Any) -> "Place":
        """Returns a place of the map: the largest cluster, with what is changed of it.

        Args:
            workers: 0: as many as the largest cluster has.
        """
        contest = best.Contest(self.calibration, replace(self.largest, **changed), self.mode_names)
        hosts = -(-(workers or self.largest.workers) // self.largest.workers_per_host)
        return Place(contest, hosts)

    def with_batch(self, batch: int) -> "CostModel":
        return replace(self, calibration=self.calibration.with_batch(batch))


class Miss(NamedTuple):
    """By how much the simulation misses a run.

    Attributes:
        log: the logarithm of the simulated step over the measured one.
        uncertain: the part of it that may be missed elsewhere too.
    """

    log: float
    uncertain: float


class Place(NamedTuple):
    """A place that is asked about: a contest on so many hosts."""

    contest: best.Contest
    hosts: int

    @property
    def workers(self) -> int:
        return self.hosts * self.contest.template.workers_per_host

    def predict(self) -> Row:
        return self.contest.place(self.hosts, detail=ROUGH)


class Change(NamedTuple):
    """What is changed of the measured place, in words, and what is predicted then."""

    preposition: str
    what: str
    place: Row


def flips(runs: Sequence[Run], word: str) -> dict[str, Any]:
    """Returns `flips` of verdict.json.

    Args:
        word: the answer of these runs.

    Returns:
        `says`, a sentence, the `map` as `hvdtrain plan predict` has it, and what was `measured`:
        workers and the answer.
    """
    try:
        chosen = _runs_of_middle_speed(runs)
        model = _modelled(chosen, measured_gbit(runs))
        found = _where_it_flips(model)
        if _spread(model.missed) > math.log(MOST_MISSED):
            found = _without_probabilities(found, model)
        return found | {"measured": {"workers": model.largest.workers, "answer": word}}
    except (UsageError, ValueError, ArithmeticError) as error:
        return {"says": f"no forecast: {error}", "map": []}


def table(found: dict[str, Any]) -> Table | None:
    """Returns the map of `flips`, with what was measured in the title."""
    if not found["map"]:
        return None
    title = "The answer elsewhere, predicted; measured with {workers} workers: {answer}"
    return map_table(found["map"], title.format(**found["measured"]))


def _runs_of_middle_speed(runs: Sequence[Run]) -> dict[Kind, Run]:
    """Returns the run of middle speed of each kind.

    Raises:
        UsageError: nothing can be said of them.
    """
    chosen = {}
    for kind, members in finished_by_kind(runs).items():
        timed = [run for run in members if kind.family and run.summary.samples_per_s]
        timed.sort(key=lambda run: run.summary.samples_per_s or 0.0)
        if timed:
            chosen[kind] = timed[(len(timed) - 1) // 2]
    distributed = _distributed(chosen).values()
    if not distributed:
        raise UsageError("nothing here is distributed")
    for run in distributed:
        slow = field_value(run, "slow.asked")
        if slow != "none":
            raise UsageError(f"{run.name} was run with --slow {slow}")
    if max(run.kind.workers for run in distributed) > MOST_WORKERS:
        raise UsageError(f"there are more than {MOST_WORKERS} workers")
    return chosen


def _distributed(chosen: Mapping[Kind, Run]) -> dict[Kind, Run]:
    return {kind: run for kind, run in chosen.items() if kind.is_distributed}


def _on_one_machine(chosen: Mapping[Kind, Run]) -> dict[Kind, Run]:
    return {kind: run for kind, run in chosen.items() if kind.family == modes.ONE_MACHINE}


def _modelled(chosen: Mapping[Kind, Run], bandwidth: float | None) -> CostModel:
    """Returns what the runs say of costs, and of the largest cluster that they had."""
    distributed = _distributed(chosen)
    machines = _on_one_machine(chosen)
    largest_kind, largest_run = max(distributed.items(), key=_by_family_and_size)
    is_local = _is_on_one_host(largest_run)
    base = of_equal_layers(largest_run)
    used = [run for kind, run in machines.items() if not kind.one_machine]
    of_runs: dict[Kind, InRun] = {}
    if is_local:
        of_runs = _on_one_host(distributed)
        computing = computing_of_all(
            list(of_runs.values()), base.batch_per_worker, base.threads_per_worker
        )
        base = with_computing(base, computing)
    else:
        used += distributed.values()
    calibration = from_runs(base, used, bandwidth)
    calibration = _with_fastest_machine(calibration, machines)
    misses = []
    for kind, run in distributed.items():
        if kind in of_runs:
            misses.append(_missed_on_one_host(of_runs[kind]))
        else:
            misses.append(_missed(calibration, run, bandwidth))
    others = max(map(_others_share, chosen.values()))
    spread = math.hypot(_spread([miss.uncertain for miss in misses]), math.log1p(others))
    error = min(MOST_ERROR, max(LEAST_ERROR, spread))
    made = calibration.made | {"others_share": others}
    calibration = replace(calibration, model_error=error, made=made)
    _, job = job_of_run(calibration, largest_run, bandwidth)
    workers_per_host = job.workers_per_host
    calibration = replace(calibration, workers_per_host=workers_per_host)
    if is_local:
        workers_per_host = 1
        calibration = _on_machines_of_their_own(calibration, largest_kind.workers)
    largest = Scenario(
        "single",
        workers=max(2, largest_kind.workers),
        bandwidth_gbit=USUAL_GBIT if job.bandwidth_gbit == LOCAL_GBIT else job.bandwidth_gbit,
        workers_per_host=workers_per_host,
        local_steps=_shared_local_steps(distributed),
    )
    mode_names = [kind.mode for kind in distributed]
    return CostModel(calibration, largest, mode_names, [miss.log for miss in misses])


def _shared_local_steps(distributed: Mapping[Kind, Run]) -> int:
    """Returns the number of local steps that all runs have; 1 where they differ."""
    counts = {run.local_steps for run in distributed.values()}
    return counts.pop() if len(counts) == 1 else 1


def _is_on_one_host(run: Run) -> bool:
    return len(run.manifest.hosts) <= 1


def _on_one_host(chosen: Mapping[Kind, Run]) -> dict[Kind, InRun]:
    """Returns what the runs on one host tell of themselves."""
    return {kind: in_run(run) for kind, run in chosen.items() if _is_on_one_host(run)}


def _missed(calibration: Calibration, run: Run, bandwidth: float | None) -> Miss:
    """Returns by how much a calibration misses a run.

    It is uncertain what remains once the bias of the run's mode is corrected, and half of the bias,
    which may be another elsewhere.
    """
    simulated = simulate(scenario_of(calibration, run, bandwidth))
    log = math.log(simulated.step_s / measured_step_s(run))
    bias = math.log(calibration.bias.get(run.kind.mode, 1.0))
    return Miss(log, math.hypot(log - bias, bias / 2))


def _missed_on_one_host(of_run: InRun) -> Miss:
    """Returns by how much the simulation misses a run on one host, given the run's own costs.

    The waits of messages are fitted to the length of its steps. Half of what they add is uncertain.
    """
    return Miss(of_run.missed, math.hypot(of_run.missed, of_run.waited / 2))


def _others_share(run: Run) -> float:
    """Returns the largest share of a host that other work had during a run; 0 if it did not disturb."""
    shares = [others_share(load) for load in disturbed_hosts(run)]
    return min(1.0, max(shares, default=0.0))


def _by_family_and_size(kind_and_run: tuple[Kind, Run]) -> tuple[bool, int]:
    """Returns the key by which a ring is more than servers, and more workers than fewer."""
    kind, _ = kind_and_run
    return kind.family == modes.RING, kind.workers


def _with_fastest_machine(calibration: Calibration, machines: Mapping[Kind, Run]) -> Calibration:
    """Returns a calibration in which one machine is as fast as the fastest run on one machine,
    which may be a ring.
    """
    speeds = {kind: run.summary.samples_per_s or 0.0 for kind, run in machines.items()}
    of_one_process = [speed for kind, speed in speeds.items() if not kind.one_machine]
    fastest_process = max(of_one_process, default=0.0)
    if not fastest_process or not calibration.machine_speedup:
        return calibration
    times = max(speeds.values()) / fastest_process
    return replace(calibration, machine_speedup=calibration.machine_speedup.times(times))


def _on_machines_of_their_own(calibration: Calibration, workers: int) -> Calibration:
    """Returns the calibration for workers with a machine each, which so far shared one.

    Each worker has all cores there, as a contender of `compare` would have. A worker that was given
    fewer threads than its share keeps them. One core may have been left free for messages.
    Intervals widen from one worker on, because none was measured on several hosts.
    """
    cores = calibration.cores_per_host
    threads = calibration.threads_per_worker
    share = max(1, int(cores / workers))
    was_given_fewer = threads < share - 1
    calibration = calibration.on_hosts(cores, 1, threads if was_given_fewer else 0)
    return replace(calibration, most_workers=1)


def _spread(missed: Sequence[float]) -> float:
    """Returns the root of the mean square of logarithms."""
    return math.sqrt(fmean(log**2 for log in missed))


def _where_it_flips(model: CostModel) -> dict[str, Any]:
    """Returns the map, the place of it that was measured, and a sentence of what turns the answer
    there.
    """
    map_places = _places(model)
    other_places = _other_places(model)
    asked = [model.place(), *map_places, *other_places.values()]
    here, *rows = parallel.each(Place.predict, asked)
    map_rows = rows[: len(map_places)]
    changes = _changes_on_map(here, map_rows)
    for words, row in zip(other_places, rows[len(map_places) :], strict=True):
        changes.append(Change(*words, row))
    measured_answer = _sure_answer(here)
    # The first change of each kind that turns the answer.
    turns: dict[tuple[str, str], str] = {}
    for change in changes:
        changed_answer = _sure_answer(change.place)
        if changed_answer not in (measured_answer, ""):
            perhaps = "perhaps " if change.place["not_validated"] else ""
            said = f"{perhaps}{changed_answer} {change.preposition} {change.what}"
            turns.setdefault((change.preposition, changed_answer), said)
    where = f"on {here['hosts']} machines at {rate(model.largest.bandwidth_gbit)}"
    if here["local_steps"] > 1:
        where += f" with {here['local_steps']} local steps"
    likeliest = max(ANSWERS, key=here.__getitem__)
    says = f"not sure ({answer(here)})"
    if measured_answer:
        beside = f", {OTHER_WORK}" if here["others_share"] else ""
        probability = f"{here[likeliest]:.2f}{_depends_on(here)}{beside}"
        says = f"{measured_answer} (probability {probability})"
    if here["not_validated"]:
        reasons = " or ".join(here["not_validated"])
        says = (
            f"perhaps {ANSWERS[likeliest]}, since predictions of {reasons} were hardly ever compared "
            "with measurements"
        )
    said_turns = "no simulated change is likely to give another answer"
    if turns:
        said_turns = f"it would be {'; '.join(turns.values())}"
    return {
        "says": f"{where}: {says}; {said_turns}",
        "leaning": f"{where}: perhaps {ANSWERS[likeliest]}",
        "map": map_rows,
        "here": here,
    }


def _places(model: CostModel) -> list[Place]:
    """Returns the places of the map: one for each number of workers and each bandwidth."""
    sizes = sorted({*WORKERS, model.largest.workers})
    bandwidths = sorted({*BANDWIDTHS, model.largest.bandwidth_gbit})
    return [
        model.place(size, bandwidth_gbit=gbit)
        for size, gbit in itertools.product(sizes, bandwidths)
        if size > model.largest.workers_per_host
    ]


def _other_places(model: CostModel) -> dict[tuple[str, str], Place]:
    """Returns the places beside the map, by the preposition and the words that say what changes."""
    places = {}
    for factor in SLOW:
        slower = f"a worker is {factor:g} times slower"
        places["where", slower] = model.place(slow=Stragglers({1: factor}))
    for times in BATCHES:
        batch = model.calibration.batch_per_worker * times
        place = model.with_batch(batch).place()
        places["with a batch of", f"{place.workers * batch:,}"] = place
    for steps in LOCAL_STEPS:
        places["with", f"{steps} local steps"] = model.place(local_steps=steps)
    return places


def _changes_on_map(here: Row, map_rows: Sequence[Row]) -> list[Change]:
    """Returns the places of the map with another bandwidth, and those with more workers."""
    changes = []
    for row in map_rows:
        if row["workers"] == here["workers"]:
            changes.append(Change("at", rate(row["bandwidth_gbit"]), row))
    for row in map_rows:
        is_larger = row["workers"] > here["workers"]
        if is_larger and row["bandwidth_gbit"] == here["bandwidth_gbit"]:
            changes.append(Change("on", f"{row['hosts']} machines", row))
    return changes


def _depends_on(place: Row) -> str:
    """Returns what turns the answer of a place, as `, which depends on jitter`; else nothing."""
    return f", which depends on {' and '.join(place['hangs_on'])}" if place["hangs_on"] else ""


def _sure_answer(place: Row) -> str:
    """Returns the answer of a place; empty where none is sure."""
    for key, name in ANSWERS.items():
        if place[key] >= SURE:
            return name
    return ""


def _without_probabilities(found: dict[str, Any], model: CostModel) -> dict[str, Any]:
    """Returns what is left of `flips` where the model misses the runs by too much."""
    says = f"{found['leaning']}, without a probability, because {_missed_in_words(model.missed)}"
    here = {key: figure for key, figure in found["here"].items() if key not in ANSWERS}
    return found | {"says": says, "map": [], "here": here}


def _missed_in_words(missed: Sequence[float]) -> str:
    """Returns by how much, and in which direction, the model misses runs."""
    factor = f"{math.exp(_spread(missed)):.1f}"
    takes = "the model takes the steps of these runs to be"
    if all(log > 0 for log in missed):
        return f"{takes} {factor} times longer than they are"
    if all(log < 0 for log in missed):
        return f"{takes} {factor} times shorter than they are"
    return (
        f"the model misses the steps of these runs by a factor of {factor}, "
        "some upwards and some downwards"
    )
