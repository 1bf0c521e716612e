"""Predictions with intervals: from a calibration and a cluster that may not exist to seconds a
step.
"""

import itertools
import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hvdtrain.base import modes
from hvdtrain.base.config.option_types import EQUAL
from hvdtrain.base.config.run_config import WIRES
from hvdtrain.base.errors import UsageError, unknown
from hvdtrain.base.modes import ONE_MACHINE
from hvdtrain.planning.calibration import Z90, Calibration
from hvdtrain.planning.layout import COARSE, FINE, ROUGH, Detail
from hvdtrain.planning.ring import SimulatedRing
from hvdtrain.planning.scenario import (
    RING_MODES,
    SERVER_MODES,
    Scenario,
    SimulatedStep,
)
from hvdtrain.planning.servers import SimulatedServers

# Simulated steps; rings cost little.
STEPS = 3
STEPS_ASYNCHRONOUS = 4
STEPS_RING = 10
# Where workers are slow at random: then a seed moves a prediction by 5 % at most.
STEPS_STRAGGLERS = 40
# Buckets in all steps together. The order of several on a link is drawn, which would show with few.
BUCKETS = 600
# Draws of a calibration for an interval, which are simulated with less detail above so many workers.
DRAWS = 12
MANY_WORKERS = 16
# The most pieces that the weights of so many workers are cut into, where these are not in lockstep.
# Twice as many would make steps up to 4 % shorter, and take twice as long to simulate.
PIECES_OF_MANY = 80
# The interval is so much wider for each doubling of workers, of servers or of bandwidth away from
# what a calibration was made with (tests/benchmarks/widening.py), and so many times as much wider
# where predictions were hardly ever compared with measurements: a guess.
WIDER_PER_DOUBLING = 0.03
WIDER_PER_DOUBLED_BANDWIDTH = 0.015
WIDER_WHERE_UNKNOWN = 2.0
# Predictions of more hosts or servers, and of slower and faster links, were hardly ever compared.
VALIDATED_HOSTS = 4
VALIDATED_GBIT = (0.05, 1.0)
# The bandwidth from which on doublings count where none was measured.
USUAL_GBIT = 1.0
# The share of one worker in all work from which on the others are spectators: that is no cluster.
LONE = 0.9
# The most bandwidth that a job may need.
MOST_GBIT = 1e3
# One is 2 % more than the one before.
RATES = [1e-4 * 1e7 ** (number / 1023) for number in range(1023)] + [MOST_GBIT]
# Nine in ten of a normal distribution are less.
Z_SURE = 1.282
Row = dict[str, Any]


def simulate(scenario: Scenario, steps: int = 0, detail: Detail = FINE) -> SimulatedStep:
    """Simulates a job, and returns what a step of it takes.

    The same arguments give the same result.

    Args:
        steps: of each worker; 0: enough of them.
    """
    # Who is slow at random is drawn for each mode by itself.
    seed = f"{scenario.seed} {scenario.mode}"
    steps = steps or _enough_steps(scenario, detail)
    if not scenario.servers:
        return SimulatedRing(scenario, steps, seed, detail).run()
    if scenario.workers > MANY_WORKERS and not scenario.in_lockstep:
        detail = detail._replace(pieces=min(detail.pieces, PIECES_OF_MANY))
    return SimulatedServers(scenario, steps, seed, detail).run()


def _enough_steps(scenario: Scenario, detail: Detail) -> int:
    """Returns how many steps say enough of a job."""
    has_random_stragglers = bool(scenario.slow.random_share)
    if not scenario.servers:
        return 2 * STEPS_STRAGGLERS if has_random_stragglers else STEPS_RING
    if has_random_stragglers:
        return STEPS_STRAGGLERS
    if not scenario.in_lockstep:
        return STEPS_ASYNCHRONOUS
    buckets = max(scenario.servers, scenario.bytes / scenario.bucket_bytes)
    return max(STEPS, min(detail.steps, math.ceil(BUCKETS / buckets)))


def scenarios(
    template: Scenario,
    mode_names: Iterable[str],
    workers: Iterable[int],
    servers: Sequence[int | str],
    bandwidths: Sequence[float],
    local_steps: Sequence[int] = (1,),
) -> list[Scenario]:
    """Returns all jobs of these modes, numbers and bandwidths whose parts go together.

    Args:
        template: has all else.
        servers: numbers, or `equal` for as many as workers.
        bandwidths: in Gbit/s.

    Raises:
        UsageError: there is no such job, or --slow names a worker that not even the largest cluster
            has.
    """
    jobs = []
    distributed = [name for name in mode_names if name in (*RING_MODES, *SERVER_MODES)]
    for n, mode in itertools.product(workers, distributed):
        server_counts = [0]
        if mode in SERVER_MODES:
            server_counts = sorted({n if count == EQUAL else int(count) for count in servers})
        has_local_steps = "local_steps" in modes.declared(mode).options
        steps_counts = local_steps if has_local_steps else [1]
        for k, gbit, steps in itertools.product(server_counts, bandwidths, steps_counts):
            job = replace(template, mode=mode, workers=n, servers=k)
            jobs.append(replace(job, bandwidth_gbit=gbit, local_steps=steps))
    if not jobs:
        raise UsageError(
            "there is nothing to predict: name a mode that has workers; "
            "one machine is beside them always"
        )
    check_slow(template, max(job.workers for job in jobs))
    return jobs


def check_slow(job: Scenario, workers: int) -> None:
    """Raises a UsageError if --slow names a worker that is not among so many."""
    absent = sorted(worker for worker in job.slow.workers if worker >= workers)
    if absent:
        raise UsageError(f"--slow: there is no worker {absent[0]}; workers are 0 to {workers - 1}")


def row(
    calibration: Calibration, job: Scenario, detail: Detail = FINE, is_drawn: bool = True
) -> Row:
    """Returns a prediction with its interval of 90 %.

    The interval has the spread of the calibration and the error of the model, both as normal
    distributions of logarithms.

    Args:
        is_drawn: whether the calibration is drawn from. If not, all figures of it count as exact.
    """
    codec = codec_of(calibration, job.mode, job.compression)
    job = replace(job, compression=codec)
    simulated = simulate(calibration.with_costs(job), detail=detail)
    step_s = simulated.step_s / calibration.bias.get(job.mode, 1.0)
    drawn = _drawn_steps(calibration, job, step_s, detail) if is_drawn else [step_s] * DRAWS
    spread = statistics.pstdev(map(math.log, drawn))
    beyond = WIDER_PER_DOUBLING / Z90 * doublings_beyond(calibration, job).weighted
    beyond += WIDER_PER_DOUBLED_BANDWIDTH / Z90 * doublings_of_bandwidth(calibration, job).weighted
    wider = math.exp(Z90 * math.hypot(spread, calibration.model_error + beyond))
    samples = speed(calibration, job, step_s)
    hosts_of_servers = job.servers if job.placement == "dedicated" else 0
    return {
        "mode": job.mode,
        "workers": job.workers,
        "servers": job.servers,
        "bandwidth_gbit": None if job.replaces else job.bandwidth_gbit,
        "server_gbit": job.server_gbit,
        "hosts": job.hosts_with_workers + hosts_of_servers,
        "worker_hosts": job.hosts_with_workers,
        "placement": job.placement if job.servers else None,
        "wire": job.wire if job.servers else None,
        "compression": job.compression,
        "local_steps": job.local_steps,
        "batch_per_worker": calibration.batch_per_worker * max(1, job.replaces),
        "step_s": step_s,
        "step_s_low": step_s / wider,
        "step_s_high": step_s * wider,
        "samples_per_s": samples,
        "samples_per_s_low": samples / wider,
        "samples_per_s_high": samples * wider,
        "exposed_comm_s": simulated.exposed_comm_s,
        "busiest_share": simulated.busiest_share,
        "staleness_mean": simulated.staleness_mean,
        "bytes_sent_per_worker": simulated.bytes_sent,
        "bytes_sent_per_server": simulated.server_bytes_sent,
        "drawn_step_s": drawn,
        "beyond": beyond,
    }


def _drawn_steps(
    calibration: Calibration, job: Scenario, step_s: float, detail: Detail
) -> list[float]:
    """Returns seconds a step with the calibration drawn anew, DRAWS times.

    Draws of a job with servers are simulated coarsely, those with many workers roughly. Only the
    ratios of draws count: their geometric mean is `step_s`.
    """
    if job.servers:
        detail = min(detail, ROUGH if job.workers > MANY_WORKERS else COARSE)
    simulated = []
    for number in range(DRAWS):
        seeded = replace(job, seed=job.seed + 1 + number)
        draw = random.Random(f"{job.seed} {number}")
        simulated.append(simulate(calibration.with_costs(seeded, draw), detail=detail).step_s)
    scale = step_s / statistics.geometric_mean(simulated)
    return [scale * drawn_s for drawn_s in simulated]


def speed(calibration: Calibration, job: Scenario, step_s: float) -> float:
    """Returns samples a second."""
    return max(job.workers, job.replaces) * calibration.batch_per_worker / step_s


def simulated_speed(calibration: Calibration, job: Scenario, simulated: SimulatedStep) -> float:
    """Returns samples a second, corrected by what runs of the job's mode are known to be missed by."""
    return speed(calibration, job, simulated.step_s / calibration.bias.get(job.mode, 1.0))


def is_lone(workers: int, busiest_share: float) -> bool:
    """Returns whether one of several workers does nearly all."""
    return workers > 1 and busiest_share >= LONE


def label(prediction: Row) -> str:
    """Returns `ps-sync ×3+1 fp16 H 8`. Servers on the workers' hosts are `+4 beside`."""
    if prediction["mode"] == "single":
        return ONE_MACHINE
    words = f"{prediction['mode']} ×{prediction['workers']}"
    if prediction["servers"]:
        words += f"+{prediction['servers']}"
    if prediction["placement"] == "shared":
        words += " beside"
    if prediction["wire"] not in (None, WIRES[0]):
        words += f" {prediction['wire']}"
    if prediction["compression"] != "none":
        words += f" {prediction['compression']}"
    if prediction["local_steps"] > 1:
        words += f" H {prediction['local_steps']}"
    return words


def codec_of(calibration: Calibration, mode: str, name: str) -> str:
    """Returns the codec that a mode sends gradients with if it is asked for one, or `none`.

    Raises:
        UsageError: the calibration does not know the codec.
    """
    known = ["none", *calibration.codecs]
    if name not in known:
        raise unknown("compression of this calibration", name, known)
    return name if modes.declared(mode).can_send(name.partition(":")[0]) else "none"


class Doublings(NamedTuple):
    """How often something is doubled away from what a calibration was made with.

    Attributes:
        compared: within what predictions were compared with measurements of.
        unknown: beyond that.
    """

    compared: float
    unknown: float

    @property
    def weighted(self) -> float:
        """Doublings of which each widens an interval as one that was compared."""
        return self.compared + WIDER_WHERE_UNKNOWN * self.unknown


def doublings_beyond(calibration: Calibration, job: Scenario) -> Doublings:
    """Returns how often workers, servers and workers on a host were doubled beyond what the
    calibration was made with.
    """
    compared = 0
    unknown = 0
    known = (job.workers, calibration.most_workers), (job.servers, calibration.most_servers)
    for count, most in known:
        of_compared = doublings_of_count(min(count, VALIDATED_HOSTS), most)
        compared += of_compared
        unknown += doublings_of_count(count, most) - of_compared
    if job.workers > 1:
        unknown += doublings_of_count(job.workers_per_host, calibration.workers_per_host)
    return Doublings(compared, unknown)


def doublings_of_bandwidth(calibration: Calibration, job: Scenario) -> Doublings:
    """Returns how often the bandwidth is doubled or halved from the one that was measured.

    Where none was measured, a network slower than USUAL_GBIT is as well known as another.
    """
    if (job.hosts_with_workers < 2 and job.placement == "shared") or job.workers < 2:
        return Doublings(0.0, 0.0)
    gbit = job.bandwidth_gbit
    known = calibration.bandwidth_gbit
    if not known:
        return Doublings(0.0, max(0.0, math.log2(gbit / USUAL_GBIT)))
    least, most = VALIDATED_GBIT
    within = min(most, max(least, gbit)) / min(most, max(least, known))
    compared = abs(math.log2(within))
    return Doublings(compared, abs(math.log2(gbit / known)) - compared)


def doublings_of_count(count: int, known: int) -> int:
    """Returns how often a number was doubled beyond one that is known."""
    times = -(-count // max(1, known))
    return max(0, times - 1).bit_length()


def needs(calibration: Calibration, jobs: Sequence[Scenario], efficiency: float) -> list[Row]:
    """Returns the bandwidth with which each job reaches an efficiency.

    Args:
        efficiency: a share of what as many workers would do that never wait.

    Returns:
        Rows with `bandwidth_gbit`, with `sure_gbit`, which is enough in nine of ten cases as far as
        the model errs, and with the efficiency `most` at MOST_GBIT. Where no bandwidth is enough,
        since messages cost processors too, both bandwidths are MOST_GBIT.
    """
    alone_s = simulate(calibration.with_costs(Scenario("single"))).step_s
    to_be_sure = efficiency * math.exp(Z_SURE * calibration.model_error)

    def reached(job: Scenario, gbit: float) -> float:
        costed = calibration.with_costs(replace(job, bandwidth_gbit=gbit))
        return alone_s / simulate(costed, detail=COARSE).step_s

    def least_gbit(job: Scenario, wanted: float) -> float:
        last = len(RATES) - 1
        return RATES[bisect_left(RATES, wanted, hi=last, key=lambda gbit: reached(job, gbit))]

    return [
        {
            "mode": job.mode,
            "workers": job.workers,
            "servers": job.servers,
            "local_steps": job.local_steps,
            "efficiency": efficiency,
            "bandwidth_gbit": least_gbit(job, efficiency),
            "sure_gbit": least_gbit(job, to_be_sure),
            "most": reached(job, MOST_GBIT),
        }
        for job in jobs
    ]
