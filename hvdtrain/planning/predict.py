"""Predictions with intervals: a calibration and a cluster that may not exist to seconds a step."""

import itertools
import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hvdtrain import modes
from hvdtrain.config.option_types import EQUAL
from hvdtrain.config.run_config import WIRES
from hvdtrain.errors import UsageError, unknown
from hvdtrain.modes import ONE_MACHINE
from hvdtrain.planning.calibration import Z90, Calibration
from hvdtrain.planning.layout import COARSE, FINE, Detail
from hvdtrain.planning.ring import Ring
from hvdtrain.planning.scenario import BUCKET_BYTES, RING_MODES, SERVER_MODES, Outcome, Scenario
from hvdtrain.planning.servers import Servers

STEPS, STEPS_ASYNCHRONOUS, STEPS_RING = 3, 4, 10  # rings cost little
STEPS_STRAGGLERS = 40  # where workers are slow at random: a seed moves a prediction by 5 % at most
BUCKETS = 600  # in all steps together: which of several is next on a link is drawn, and of few it would show
DRAWS = 12  # of a calibration, for an interval
# For each doubling of servers or workers beyond what a calibration was made with, the interval is so much wider.
WIDER_PER_DOUBLING = 0.02
LONE = 0.9  # share of the work of one worker from which on others are spectators: that is no cluster
MOST_GBIT = 1e3  # that a job may need
RATES = [1e-4 * 1e7 ** (number / 1023) for number in range(1023)] + [MOST_GBIT]  # a step is 2 %
Z_SURE = 1.282  # nine in ten of a normal distribution are less
Row = dict[str, Any]


def simulate(scenario: Scenario, steps: int = 0, detail: Detail = FINE) -> Outcome:
    """Simulate so many steps, or enough of them. The same arguments give the same outcome."""
    of_mode = f"{scenario.seed} {scenario.mode}"  # what is slow at random in one mode is not in another
    if not scenario.servers:
        enough = 2 * STEPS_STRAGGLERS if scenario.slow.random_share else STEPS_RING
        return Ring(scenario, steps or enough, of_mode, detail).run()
    buckets = max(scenario.servers, scenario.bytes / BUCKET_BYTES)
    enough = max(STEPS, min(detail.steps, math.ceil(BUCKETS / buckets)))
    if not scenario.in_lockstep:
        enough = STEPS_ASYNCHRONOUS
    if scenario.slow.random_share:
        enough = STEPS_STRAGGLERS
    return Servers(scenario, steps or enough, of_mode, detail).run()


def scenarios(
    asked: Scenario, names: Iterable[str], workers: Iterable[int], servers: Sequence[int | str],
    bandwidths: Sequence[float], local_steps: Sequence[int] = (1,),
) -> list[Scenario]:  # fmt: skip
    """Every mode, number of workers and of servers, of local steps, and bandwidth in Gbit/s that go together.
    UsageError where there are none, or --slow names a worker that not even the largest cluster has.
    """
    jobs = []
    distributed = [name for name in names if name in (*RING_MODES, *SERVER_MODES)]
    for n, mode in itertools.product(workers, distributed):
        counts = {n if count == EQUAL else int(count) for count in servers} if mode in SERVER_MODES else {0}
        steps = local_steps if "local_steps" in modes.declared(mode).options else [1]
        jobs += [
            replace(asked, mode=mode, workers=n, servers=k, bandwidth_gbit=gbit, local_steps=h)
            for k, gbit, h in itertools.product(sorted(counts), bandwidths, steps)
        ]
    if not jobs:
        raise UsageError("there is nothing to predict: name a mode that has workers; one machine is beside them always")
    check_slow(asked, max(job.workers for job in jobs))
    return jobs


def check_slow(asked: Scenario, workers: int) -> None:
    """UsageError where --slow names a worker that so many are not."""
    if absent := sorted(worker for worker in asked.slow.workers if worker >= workers):
        raise UsageError(f"--slow: there is no worker {absent[0]}; workers are 0 to {workers - 1}")


def row(calibration: Calibration, asked: Scenario, detail: Detail = FINE, is_drawn: bool = True) -> Row:
    """One prediction with its interval of 90 %: as far as the calibration spreads and the model errs, both as normal
    distributions of logarithms.

    Args:
        is_drawn: without that, as if all figures of the calibration were exact.
    """
    asked = replace(asked, compression=codec_of(calibration, asked.mode, asked.compression))
    outcome = simulate(calibration.scenario(asked), detail=detail)
    step_s = outcome.step_s
    draws = _draws(calibration, asked, step_s, detail) if is_drawn else [step_s] * DRAWS
    spread = statistics.pstdev(map(math.log, draws))
    beyond = WIDER_PER_DOUBLING / Z90 * doublings_beyond(calibration, asked)
    wider = math.exp(Z90 * math.hypot(spread, calibration.model_error + beyond))
    samples = speed(calibration, asked, step_s)
    worker_hosts = -(-asked.workers // asked.workers_per_host)
    return {
        "mode": asked.mode, "workers": asked.workers, "servers": asked.servers,
        "bandwidth_gbit": None if asked.replaces else asked.bandwidth_gbit, "server_gbit": asked.server_gbit,
        "hosts": worker_hosts + (asked.servers if asked.placement == "dedicated" else 0), "worker_hosts": worker_hosts,
        "placement": asked.placement if asked.servers else None,
        "wire": asked.wire if asked.servers else None,
        "compression": asked.compression, "local_steps": asked.local_steps,
        "batch_per_worker": calibration.batch_per_worker * max(1, asked.replaces),
        "step_s": step_s, "step_s_low": step_s / wider, "step_s_high": step_s * wider,
        "samples_per_s": samples, "samples_per_s_low": samples / wider, "samples_per_s_high": samples * wider,
        "exposed_comm_s": outcome.exposed_comm_s, "busiest_share": outcome.busiest_share,
        "staleness_mean": outcome.staleness_mean, "bytes_sent_per_worker": outcome.bytes_sent,
        "bytes_sent_per_server": outcome.server_bytes_sent, "drawn_step_s": draws, "beyond": beyond,
    }  # fmt: skip


def speed(calibration: Calibration, job: Scenario, step_s: float) -> float:
    """Samples a second."""
    return max(job.workers, job.replaces) * calibration.batch_per_worker / step_s


def is_lone(workers: int, busiest_share: float) -> bool:
    """Whether one of several workers does nearly all."""
    return workers > 1 and busiest_share >= LONE


def label(at: Row) -> str:
    """`ps-sync ×3+1 fp16 H 8`; `+4 beside` are servers on the workers' hosts."""
    if at["mode"] == "single":
        return ONE_MACHINE
    words = f"{at['mode']} ×{at['workers']}" + (f"+{at['servers']}" if at["servers"] else "")
    words += " beside" if at["placement"] == "shared" else ""
    words += f" {at['wire']}" if at["wire"] not in (None, WIRES[0]) else ""
    words += f" {at['compression']}" if at["compression"] != "none" else ""
    return words + (f" H {at['local_steps']}" if at["local_steps"] > 1 else "")


def codec_of(calibration: Calibration, mode: str, name: str) -> str:
    """The codec that a mode sends gradients with, or `none`. UsageError where the calibration does not know it."""
    if name not in (known := ["none", *calibration.codecs]):
        raise unknown("compression of this calibration", name, known)
    return name if modes.declared(mode).can_send(name.partition(":")[0]) else "none"


def _draws(calibration: Calibration, asked: Scenario, step_s: float, known: Detail) -> list[float]:
    """Seconds a step with the calibration drawn anew; with servers by coarse simulations, of which ratios count."""
    detail, draws = min(known, COARSE) if asked.servers else known, []
    for number in range(DRAWS):
        seeded, draw = replace(asked, seed=asked.seed + 1 + number), random.Random(f"{asked.seed} {number}")
        draws.append(simulate(calibration.scenario(seeded, draw), detail=detail).step_s)
    scale = step_s / statistics.geometric_mean(draws)
    return [scale * drawn_s for drawn_s in draws]


def doublings_beyond(calibration: Calibration, asked: Scenario) -> int:
    """Doublings of workers and of servers beyond what the calibration was made with."""
    both = ((asked.workers, calibration.most_workers), (asked.servers, calibration.most_servers))
    return sum(max(0, -(-count // max(1, known)) - 1).bit_length() for count, known in both)


def needs(calibration: Calibration, jobs: Sequence[Scenario], efficiency: float) -> list[Row]:
    """The bandwidth in Gbit/s with which workers do a share of what as many would that never wait.

    `sure_gbit` is that with which they do so in nine of ten cases, as far as the model errs. Where no bandwidth is
    enough, since messages cost processors too, both are MOST_GBIT; `most` is the share that this leaves.
    """
    alone_s = simulate(calibration.scenario(Scenario("single"))).step_s

    def share(job: Scenario, gbit: float) -> float:
        asked = calibration.scenario(replace(job, bandwidth_gbit=gbit))
        return alone_s / simulate(asked, detail=COARSE).step_s

    rows = []
    for job in jobs:
        enough, sure = (
            RATES[bisect_left(RATES, wanted, hi=len(RATES) - 1, key=partial(share, job))]
            for wanted in (efficiency, efficiency * math.exp(Z_SURE * calibration.model_error))
        )
        rows.append({
            "mode": job.mode, "workers": job.workers, "servers": job.servers, "local_steps": job.local_steps,
            "efficiency": efficiency, "bandwidth_gbit": enough, "sure_gbit": sure, "most": share(job, MOST_GBIT),
        })  # fmt: skip
    return rows
