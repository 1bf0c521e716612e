"""Predictions with intervals: a calibration and a cluster that may not exist to seconds a step."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hvdtrain import modes
from hvdtrain.config.option_types import EQUAL
from hvdtrain.errors import UsageError, unknown
from hvdtrain.planning.calibration import Calibration
from hvdtrain.planning.layout import COARSE, FINE
from hvdtrain.planning.scenario import SERVER_MODES, Scenario
from hvdtrain.planning.simulate import simulate

DRAWS = 12  # of a calibration, for an interval
LEAST_LEAD = 1.05  # a smaller one is none: the simulation is not so good
# For each doubling of servers or workers beyond what a calibration was made with, the interval is so much wider.
WIDER_PER_DOUBLING = 0.02
Row = dict[str, Any]


def scenarios(
    asked: Scenario, names: Iterable[str], workers: Iterable[int], servers: Sequence[int | str],
    bandwidths: Sequence[float],
) -> list[Scenario]:  # fmt: skip
    """Every mode, number of workers and of servers, and bandwidth in Gbit/s that go together.

    Raises:
        UsageError: there are none, or --slow names a worker that not even the largest cluster has.
    """
    jobs = []
    for n in workers:
        for mode in names:
            counts = {n if count == EQUAL else int(count) for count in servers} if mode in SERVER_MODES else {0}
            for k in sorted(counts) if mode != "single" or n == 1 else []:
                jobs += [replace(asked, mode=mode, workers=n, servers=k, bandwidth_gbit=gbit) for gbit in bandwidths]
    if not jobs:
        raise UsageError("there is nothing to predict: single has one worker, all others take any number")
    check_slow(asked, max(job.workers for job in jobs))
    return jobs


def check_slow(asked: Scenario, workers: int) -> None:
    """UsageError where --slow names a worker that so many are not."""
    if absent := sorted(worker for worker in asked.slow.workers if worker >= workers):
        raise UsageError(f"--slow: there is no worker {absent[0]}; workers are 0 to {workers - 1}")


def row(calibration: Calibration, asked: Scenario, seed: int = 0) -> Row:
    """One prediction with its interval."""
    asked = replace(asked, compression=codec_of(calibration, asked.mode, asked.compression))
    outcome = simulate(calibration.scenario(asked), seed=seed)
    draws = _draws(calibration, asked, seed, outcome.step_s)
    wider = 1 + calibration.model_error + WIDER_PER_DOUBLING * doublings_beyond(calibration, asked)
    low, high = min([outcome.step_s, *draws]) / wider, max([outcome.step_s, *draws]) * wider
    samples = asked.workers * calibration.batch_per_worker
    hosts = -(-asked.workers // asked.workers_per_host) + (asked.servers if asked.placement == "dedicated" else 0)
    return {
        "mode": asked.mode, "workers": asked.workers, "servers": asked.servers,
        "bandwidth_gbit": asked.bandwidth_gbit, "hosts": hosts,
        "placement": asked.placement if asked.servers else None, "compression": asked.compression,
        "batch_per_worker": calibration.batch_per_worker,
        "step_s": outcome.step_s, "step_s_low": low, "step_s_high": high,
        "samples_per_s": samples / outcome.step_s, "samples_per_s_low": samples / high,
        "samples_per_s_high": samples / low,
        "exposed_comm_s": outcome.exposed_comm_s,
        "staleness_mean": outcome.staleness_mean, "bytes_sent_per_worker": outcome.bytes_sent,
        "bytes_sent_per_server": outcome.server_bytes_sent,
        "drawn_step_s": draws,
    }  # fmt: skip


def codec_of(calibration: Calibration, mode: str, name: str) -> str:
    """What a mode sends gradients with that is asked for a codec: `none` where it has not that one.

    Raises:
        UsageError: the calibration knows no such codec.
    """
    if name not in (known := ["none", *calibration.codecs]):
        raise unknown("compression of this calibration", name, known)
    return name if modes.declared(mode).can_send(name.partition(":")[0]) else "none"


def _draws(calibration: Calibration, asked: Scenario, seed: int, step_s: float) -> list[float]:
    """Seconds a step with the calibration drawn anew.

    Of jobs with servers coarser ones are drawn: only the ratio to such a simulation at the medians is used.
    """
    detail = COARSE if asked.servers else FINE
    middle_s = step_s
    if asked.servers:
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


def winners(predicted: Sequence[Row]) -> list[Row]:
    """For each number of workers and bandwidth: ring or servers, the best of each, over all numbers of servers; with
    the same compression, if both have it.

    `either` where the lead is less than a twentieth, or gone in one of the draws of the calibration, each of which
    has the same of what both share.
    """
    best = []
    for workers, bandwidth in sorted({(row["workers"], row["bandwidth_gbit"]) for row in predicted}):
        rows = [row for row in predicted if (row["workers"], row["bandwidth_gbit"]) == (workers, bandwidth)]
        of_rings, of_servers = ({r["compression"] for r in rows if bool(r["servers"]) == has} for has in (False, True))
        if workers == 1 or not of_rings or not of_servers:
            continue
        alike = [row for row in rows if row["compression"] in (of_rings & of_servers or of_rings | of_servers)]
        first = min(alike, key=lambda row: row["step_s"])
        others = [row for row in alike if bool(row["servers"]) != bool(first["servers"])]
        second = min(others, key=lambda row: row["step_s"])
        drawn = [b / a for a, b in zip(first["drawn_step_s"], second["drawn_step_s"], strict=True)]
        best.append({
            "workers": workers, "bandwidth_gbit": bandwidth, "winner": first["mode"], "servers": first["servers"],
            "compression": first["compression"], "second": second["mode"], "second_servers": second["servers"],
            "second_compression": second["compression"],
            "times_as_fast": second["step_s"] / first["step_s"],
            "either": second["step_s"] < LEAST_LEAD * first["step_s"] or min(drawn) < 1,
        })  # fmt: skip
    return best
