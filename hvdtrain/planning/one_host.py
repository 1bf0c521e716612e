"""What runs on one host tell of computing, and of messages within the host.

Workers and servers share the host's cores there, and messages do not cross a network. See
README.md, "Runs on one host".
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hvdtrain.base.world.load import beside_others, others_share
from hvdtrain.planning.calibration import LEAST_CORES, Calibration, Quantity
from hvdtrain.planning.check import measured_step_s
from hvdtrain.planning.equal_layers import of_equal_layers
from hvdtrain.planning.from_runs import (
    MOST_CHANGE,
    factors_of_messages,
    message_seconds,
    scenario_of,
    seconds_of_messages,
    transport_name,
    with_factors,
)
from hvdtrain.planning.predict import simulate
from hvdtrain.planning.scenario import Scenario
from hvdtrain.runs.read import Run
from hvdtrain.runs.schema import Load

# What is tried for `local_waits`. Messages are not believed to wait longer than they work.
WAITS = [number / 10 for number in range(11)]


class TypicalStep(NamedTuple):
    """A step of a run that takes as long as most do.

    Attributes:
        seconds: wall seconds.
        computing_s: the part of them in which a worker computes forward and backward.
        computing_cpu_s: the processor seconds of a worker's main thread in that part; 0 where they
            were not recorded.
        cpu_s: the processor seconds of each process, by rank; empty where they were not recorded
            for the whole run.
    """

    seconds: float
    computing_s: float
    computing_cpu_s: float
    cpu_s: dict[int, float]


class InRun(NamedTuple):
    """What a run on one host tells of itself.

    Attributes:
        step: a typical step of it.
        calibration: has the run's costs.
        simulated_s: the seconds of a step that the simulation takes with these costs.
        waited: the logarithm of the factor by which waits of messages make this step longer.
    """

    step: TypicalStep
    calibration: Calibration
    simulated_s: float
    waited: float = 0.0

    @property
    def missed(self) -> float:
        """The logarithm of the simulated step over the measured one."""
        return math.log(self.simulated_s / self.step.seconds)


def in_run(run: Run) -> InRun:
    """Returns what a run on one host tells of computing and messages.

    Computing takes its processor time. The rest of the processor time is that of messages. If a
    step takes longer than both explain, messages wait.

    Raises:
        UsageError: the run does not say what a step takes.
    """
    base = of_equal_layers(run)
    step = _typical_step(run)
    computing = Quantity.exactly(_computing_s(_job_of(base, run), step))
    calibration = with_computing(base, computing)
    job = _job_of(calibration, run)
    if not job.on_processor or not step.cpu_s:
        return InRun(step, calibration, simulate(job).step_s)
    name = transport_name(run)
    known = calibration.transports
    costs = known.get(name, known["allreduce"])
    calibration = replace(calibration, transports=known | {name: costs})
    factors = factors_of_messages(job, seconds_of_messages(job, step.cpu_s))
    calibration = with_factors(calibration, name, [factors])
    tried = []
    for waits in WAITS:
        with_waits = calibration.with_transport(name, {"local_waits": Quantity.exactly(waits)})
        tried.append(InRun(step, with_waits, simulate(_job_of(with_waits, run)).step_s))
    best = min(tried, key=lambda one: abs(one.missed))
    return best._replace(waited=best.missed - tried[0].missed)


def _job_of(calibration: Calibration, run: Run) -> Scenario:
    """Returns the job that a run was, on the cores of its host that other work left."""
    job = scenario_of(calibration, run)
    return replace(job, cores=min(job.cores, _cores_left(run)))


def _cores_left(run: Run) -> float:
    """Returns the cores that other work left on a run's host; infinite if none disturbed the run."""
    left = [(load.cores or 0) * (1 - others_share(load)) for load in disturbed_hosts(run)]
    return max(LEAST_CORES, min(left, default=math.inf))


def disturbed_hosts(run: Run) -> list[Load]:
    """Returns the loads of the hosts on which other work disturbed a run."""
    loads = run.summary.load
    return [load for name, load in loads.items() if load.cores and beside_others({name: load})]


def _typical_step(run: Run) -> TypicalStep:
    """Returns a typical step.

    A summary has sums over all steps, also over a few that took very long. What is in these sums is
    taken to have the same share of each step.

    Raises:
        UsageError: there are too few steps.
    """
    summary = run.summary
    seconds = measured_step_s(run)
    parts = summary.step_seconds
    times = seconds / (sum(parts.values()) or math.inf)
    cpu_s = {}
    for process in summary.processes:
        if process.rank is not None and process.cpu_s and summary.wall_s:
            cpu_s[process.rank] = process.cpu_s / summary.wall_s * seconds
    # A run that was resumed has rows of its last start. An older version may have recorded no
    # processor time of computing in its first one.
    is_resumed = len(run.manifest.parts) > 1
    is_whole = len(cpu_s) == run.kind.workers + run.kind.servers and not is_resumed
    return TypicalStep(
        seconds,
        times * (parts.get("forward", 0.0) + parts.get("backward", 0.0)),
        0.0 if is_resumed else times * (summary.computing_cpu_seconds or 0.0),
        cpu_s if is_whole else {},
    )


def _computing_s(job: Scenario, step: TypicalStep) -> float:
    """Returns the seconds that a worker computes in a step if nothing else has its cores.

    They are the processor seconds of its main thread. If these were not recorded, this returns an
    upper bound: computing takes at most its wall time, and at most the processor time that messages
    leave.

    Args:
        job: the run, with its wall time of computing, and guesses of what messages cost.
    """
    is_crowded = job.workers * job.threads + job.servers > job.cores
    # A main thread that waits for its helpers takes no processor time.
    is_wall_time = job.threads > 1 and not is_crowded
    if is_wall_time or not job.on_processor:
        return step.computing_s
    if step.computing_cpu_s:
        return min(step.computing_s, step.computing_cpu_s)
    if not step.cpu_s:
        return step.computing_s
    of_workers = [cpu_s for rank, cpu_s in step.cpu_s.items() if rank >= job.servers]
    left_s = statistics.fmean(of_workers) - _least_beside_computing_s(job)
    # What is left of very few processor seconds is noise.
    left_s = max(left_s, step.computing_s / MOST_CHANGE)
    return min(step.computing_s, left_s / job.threads)


def _least_beside_computing_s(job: Scenario) -> float:
    """Returns the processor seconds of a step that a worker takes at least beside forward and
    backward.
    """
    each, at_workers, _ = message_seconds(job)
    if job.servers:
        # Workers and servers have half of the messages each.
        each /= 2
    messages_s = (each + at_workers) / job.workers / MOST_CHANGE
    return job.fixed_s + (job.worker_optimizer_s + messages_s) / job.local_steps


def with_computing(base: Calibration, seconds: Quantity) -> Calibration:
    """Returns the calibration in which forward and backward take so many seconds together."""
    known_s = computing_s(base)
    value = seconds.value / known_s
    low = seconds.low / known_s
    high = seconds.high / known_s

    def scaled(took: Quantity) -> Quantity:
        return Quantity(took.value * value, took.low * low, took.high * high)

    return replace(base, layers=base.changed_layers(scaled))


def computing_s(calibration: Calibration) -> float:
    """Returns the seconds of forward and backward together."""
    return 1e-3 * calibration.layers_ms


def computing_of_all(found: Sequence[InRun], batch: int, threads: int) -> Quantity:
    """Returns the seconds that a worker computes in a step, as runs tell it.

    Args:
        found: of each run.
        batch: the worker's samples in a step.
        threads: the worker's threads.
    """
    seconds = []
    for of_run in found:
        seconds.append(computing_s(of_run.calibration.with_batch(batch).with_threads(threads)))
    is_on_gpu = found[0].calibration.device == "cuda"
    if is_on_gpu or all(of_run.step.computing_cpu_s for of_run in found):
        return Quantity.of(seconds)
    # Upper bounds, of which the least is the nearest.
    return Quantity.exactly(min(seconds))
