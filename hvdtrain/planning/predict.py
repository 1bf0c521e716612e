"""Predictions with intervals: a calibration and a cluster that may not exist to seconds a step."""

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hvdtrain import modes
from hvdtrain.config.option_types import EQUAL
from hvdtrain.errors import UsageError, unknown
from hvdtrain.modes import ONE_MACHINE
from hvdtrain.planning.calibration import Z90, Calibration
from hvdtrain.planning.layout import COARSE, FINE, Detail
from hvdtrain.planning.scenario import RING_MODES, SERVER_MODES, Scenario
from hvdtrain.planning.simulate import simulate

DRAWS = 12  # of a calibration, for an interval
# For each doubling of servers or workers beyond what a calibration was made with, the interval is so much wider.
WIDER_PER_DOUBLING = 0.02
Row = dict[str, Any]


def scenarios(
    asked: Scenario, names: Iterable[str], workers: Iterable[int], servers: Sequence[int | str],
    bandwidths: Sequence[float], local_steps: Sequence[int] = (1,),
) -> list[Scenario]:  # fmt: skip
    """Every mode, number of workers and of servers, of local steps, and bandwidth in Gbit/s that go together.

    Raises:
        UsageError: there are none, or --slow names a worker that not even the largest cluster has.
    """
    jobs = []
    for n, mode in itertools.product(workers, (name for name in names if name in (*RING_MODES, *SERVER_MODES))):
        counts = {n if count == EQUAL else int(count) for count in servers} if mode in SERVER_MODES else {0}
        of_mode = replace(asked, mode=mode, workers=n)
        steps = local_steps if "local_steps" in modes.declared(mode).options else [1]
        jobs += [
            replace(of_mode, servers=k, bandwidth_gbit=gbit, local_steps=h)
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


def row(
    calibration: Calibration, asked: Scenario, seed: int = 0, detail: Detail = FINE, is_drawn: bool = True
) -> Row:  # fmt: skip
    """One prediction with its interval of 90 %: as far as the calibration spreads and the model errs, both as normal
    distributions of logarithms.

    Args:
        is_drawn: without that, as if all figures of the calibration were exact.
    """
    asked = replace(asked, compression=codec_of(calibration, asked.mode, asked.compression))
    outcome = simulate(calibration.scenario(asked), seed=seed, detail=detail)
    draws = [outcome.step_s] * DRAWS
    if is_drawn:
        draws = _draws(calibration, asked, seed, outcome.step_s, detail)
    spread = statistics.pstdev([math.log(drawn) for drawn in draws])
    beyond = WIDER_PER_DOUBLING / Z90 * doublings_beyond(calibration, asked)
    wider = math.exp(Z90 * math.hypot(spread, calibration.model_error + beyond))
    low, high = outcome.step_s / wider, outcome.step_s * wider
    hosts = -(-asked.workers // asked.workers_per_host) + (asked.servers if asked.placement == "dedicated" else 0)
    return {
        "mode": asked.mode, "workers": asked.workers, "servers": asked.servers,
        "bandwidth_gbit": None if asked.replaces else asked.bandwidth_gbit, "hosts": hosts,
        "placement": asked.placement if asked.servers else None, "compression": asked.compression,
        "local_steps": asked.local_steps,
        "batch_per_worker": calibration.batch_per_worker * max(1, asked.replaces),
        "step_s": outcome.step_s, "step_s_low": low, "step_s_high": high,
        "samples_per_s": speed(calibration, asked, outcome.step_s),
        "samples_per_s_low": speed(calibration, asked, high), "samples_per_s_high": speed(calibration, asked, low),
        "exposed_comm_s": outcome.exposed_comm_s, "busiest_share": outcome.busiest_share,
        "staleness_mean": outcome.staleness_mean, "bytes_sent_per_worker": outcome.bytes_sent,
        "bytes_sent_per_server": outcome.server_bytes_sent,
        "drawn_step_s": draws, "beyond": beyond,
    }  # fmt: skip


def speed(calibration: Calibration, job: Scenario, step_s: float) -> float:
    """Samples a second."""
    return max(job.workers, job.replaces) * calibration.batch_per_worker / step_s


def label(at: Row) -> str:
    """`ps-sync ×3+1 fp16 H 8`; `+4 beside` are servers on the workers' hosts."""
    if at["mode"] == "single":
        return ONE_MACHINE
    beside = " beside" if at["placement"] == "shared" else ""
    parts = [f"{at['mode']} ×{at['workers']}" + (f"+{at['servers']}{beside}" if at["servers"] else "")]
    parts += [at["compression"]] if at["compression"] != "none" else []
    return " ".join([*parts, f"H {at['local_steps']}"] if at["local_steps"] > 1 else parts)


def codec_of(calibration: Calibration, mode: str, name: str) -> str:
    """What a mode sends gradients with that is asked for a codec: `none` where it has not that one.

    Raises:
        UsageError: the calibration knows no such codec.
    """
    if name not in (known := ["none", *calibration.codecs]):
        raise unknown("compression of this calibration", name, known)
    return name if modes.declared(mode).can_send(name.partition(":")[0]) else "none"


def _draws(calibration: Calibration, asked: Scenario, seed: int, step_s: float, known: Detail) -> list[float]:
    """Seconds a step with the calibration drawn anew.

    Of jobs with servers coarser ones are drawn: only the ratio to such a simulation at the medians is used.
    """
    detail = min(known, COARSE) if asked.servers else FINE
    middle_s = step_s
    if asked.servers and known != detail:
        middle_s = simulate(calibration.scenario(asked), seed=seed, detail=detail).step_s
    draws = []
    for number in range(DRAWS):
        drawn = calibration.scenario(asked, random.Random(f"{seed} {number}"))
        draws.append(step_s * simulate(drawn, seed=seed + 1 + number, detail=detail).step_s / middle_s)
    return draws


def doublings_beyond(calibration: Calibration, asked: Scenario) -> int:
    """Doublings of workers and of servers beyond what the calibration was made with."""
    both = ((asked.workers, calibration.most_workers), (asked.servers, calibration.most_servers))
    return sum(max(0, -(-count // max(1, known)) - 1).bit_length() for count, known in both)
