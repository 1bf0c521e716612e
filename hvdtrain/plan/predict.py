"""Predictions with intervals: a calibration and a cluster that may not exist to seconds a step."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain import modes
from hvdtrain.errors import UsageError, unknown
from hvdtrain.plan.calibration import Calibration
from hvdtrain.plan.layout import COARSE, FINE
from hvdtrain.plan.scenario import MODES, SERVER_MODES, Scenario, Slow
from hvdtrain.plan.simulate import simulate

DRAWS = 12  # of a calibration, for an interval
LEAST_LEAD = 1.05  # a smaller one is none: the simulation is not so good
# For each doubling of servers or workers beyond what a calibration was made with, the interval is so much wider.
WIDER_PER_DOUBLING = 0.02
Row = dict[str, Any]
Cell = tuple[str, int, int, float]  # mode, workers, servers, bandwidth in Gbit/s


@dataclass(frozen=True)
class Question:
    """What is asked for, beside a scenario's workers, servers and bandwidth.

    Attributes:
        bandwidth_gbit: inf where hosts are as one.
        batch: of each worker; 0 for the calibration's.
    """

    modes: Sequence[str]
    compression: str = "none"
    batch: int = 0
    placement: str = "dedicated"
    per_host: int = 1
    latency_us: float | None = None
    slow: Slow = field(default_factory=Slow)
    staleness: int = 2
    seed: int = 0
    softsync: bool = True
    leased: bool = True
    round_steps: int = 0


def cells(
    question: Question, workers: Iterable[int], servers: Sequence[int | str], bandwidths: Sequence[float]
) -> list[Cell]:
    """Every mode, number of workers and of servers, and bandwidth in Gbit/s that go together."""
    found = []
    for n in workers:
        for mode in question.modes:
            of_servers = sorted({n if k == "equal" else int(k) for k in servers}) if mode in SERVER_MODES else [0]
            for k in of_servers if mode != "single" or n == 1 else []:
                found += [(mode, n, k, bandwidth) for bandwidth in bandwidths]
    return found


def row(calibration: Calibration, question: Question, mode: str, workers: int, servers: int, bandwidth: float) -> Row:
    """One prediction with its interval."""
    job = scenario(calibration, question, mode, workers, servers, bandwidth)
    outcome = simulate(job, seed=question.seed)
    draws = _draws(calibration, question, job, outcome.step_s)
    wider = 1 + calibration.model_error + WIDER_PER_DOUBLING * beyond(calibration, workers, servers)
    low, high = min([outcome.step_s, *draws]) / wider, max([outcome.step_s, *draws]) * wider
    batch = question.batch or calibration.batch_per_worker
    return {
        "mode": mode, "workers": workers, "servers": servers, "bandwidth_gbit": bandwidth,
        "hosts": job.hosts, "placement": question.placement if servers else None,
        "compression": codec_of(calibration, mode, question.compression), "batch_per_worker": batch,
        "step_s": outcome.step_s, "step_s_low": low, "step_s_high": high,
        "samples_per_s": workers * batch / outcome.step_s, "samples_per_s_low": workers * batch / high,
        "samples_per_s_high": workers * batch / low,
        "exposed_comm_s": outcome.exposed_comm_s,
        "staleness_mean": outcome.staleness_mean, "bytes_sent_per_worker": outcome.bytes_sent,
        "bytes_sent_per_server": outcome.server_bytes_sent,
        "drawn_step_s": draws,
    }  # fmt: skip


def scenario(
    calibration: Calibration, question: Question, mode: str, workers: int, servers: int, bandwidth: float,
    draw: random.Random | None = None,
) -> Scenario:  # fmt: skip
    """The scenario at the calibration's medians or, with a generator, as its measurements might have come out."""
    # A draw has the same in each mode of what all share.
    layers, fixed = calibration.scenario_layers(draw, question.batch), calibration.fixed_ms.drawn(draw)
    optimizer = calibration.optimizer_ms_per_mb.drawn(draw)
    latency = calibration.latency_us.drawn(draw) if question.latency_us is None else question.latency_us
    return Scenario(
        mode, layers, workers, servers, bandwidth=bandwidth * 1e9 / 8, latency_s=latency * 1e-6,
        transport=calibration.transport(mode, draw), fixed_s=fixed / 1e3 * calibration.batch_factor(question.batch),
        optimizer_s_per_mb=optimizer / 1e3, jitter=calibration.step_jitter,
        cores=calibration.cores_per_host, threads=calibration.threads_per_worker,
        on_processor=calibration.device == "cpu",
        workers_per_host=question.per_host, placement=question.placement, staleness=question.staleness,
        slow=question.slow, softsync=question.softsync, leased=question.leased, round_steps=question.round_steps,
        **_codec(calibration, codec_of(calibration, mode, question.compression), draw),
    )  # fmt: skip


def codec_of(calibration: Calibration, mode: str, name: str) -> str:
    """What a mode sends gradients with that is asked for a codec: `none` where it has not that one.

    Raises:
        UsageError: the calibration knows no such codec.
    """
    if name not in (known := ["none", *calibration.codecs]):
        raise unknown("compression of this calibration", name, known)
    return name if modes.declared(mode).can_send(name.partition(":")[0]) else "none"


def _codec(calibration: Calibration, name: str, draw: random.Random | None) -> dict[str, Any]:
    """What a codec adds to a scenario."""
    if name == "none":
        return {}
    costs = calibration.codecs[name]
    return {
        "encode_s_per_mb": costs["encode_ms_per_mb"].drawn(draw) / 1e3,
        "decode_s_per_mb": costs["decode_ms_per_mb"].drawn(draw) / 1e3, "wire_share": costs["wire_share"].value,
    }  # fmt: skip


def _draws(calibration: Calibration, question: Question, job: Scenario, step_s: float) -> list[float]:
    """Seconds a step with the calibration drawn anew.

    Of jobs with servers coarser ones are drawn: only the ratio to such a simulation at the medians is used.
    """
    detail = COARSE if job.servers else FINE
    middle = simulate(job, seed=question.seed, detail=detail).step_s if job.servers else step_s
    found = []
    for number in range(DRAWS):
        draw = random.Random(f"{question.seed} {number}")
        drawn = scenario(calibration, question, job.mode, job.workers, job.servers, job.bandwidth * 8 / 1e9, draw)
        found.append(step_s * simulate(drawn, seed=question.seed + 1 + number, detail=detail).step_s / middle)
    return found


def beyond(calibration: Calibration, workers: int, servers: int) -> int:
    """Doublings of workers and of servers beyond what the calibration was made with."""
    found = 0
    for asked, known in ((workers, calibration.most_workers), (servers, calibration.most_servers)):
        found += max(0, -(-asked // max(1, known)) - 1).bit_length()
    return found


def check(question: Question, workers: int) -> None:
    """UsageError where there is no such mode, or --slow names a worker that not even the largest cluster has."""
    for mode in question.modes:
        if mode not in MODES:
            raise unknown("mode", mode, list(MODES))
    if absent := sorted(worker for worker in question.slow.workers if worker >= workers):
        raise UsageError(f"--slow: there is no worker {absent[0]}; workers are 0 to {workers - 1}")


def winners(found: Sequence[Row]) -> list[Row]:
    """For each number of workers and bandwidth: ring or servers, the best of each, over all numbers of servers; with
    the same compression, if both have it.

    `either` where the lead is less than a twentieth, or gone in one of the draws of the calibration, each of which
    has the same of what both share.
    """
    best = []
    places = sorted({(row["workers"], row["bandwidth_gbit"]) for row in found if row["workers"] > 1})
    for workers, bandwidth in places:
        own = [row for row in found if (row["workers"], row["bandwidth_gbit"]) == (workers, bandwidth)]
        of_rings, of_servers = ({r["compression"] for r in own if (r["servers"] > 0) == side} for side in (False, True))
        own = [row for row in own if row["compression"] in (of_rings & of_servers or of_rings | of_servers)]
        first = min(own, key=lambda row: row["step_s"])
        others = [row for row in own if (row["servers"] > 0) != (first["servers"] > 0)]
        if not others:
            continue
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
