"""What a run would have been without this or that, from its recorded steps."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from hvdtrain.explaining.account import Account, waits_for_others, wire
from hvdtrain.explaining.straggler import Straggler
from hvdtrain.explaining.timeline import BETWEEN, COMPUTED, SAMPLES, WAITED, Timeline
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import Run


def what_if(run: Run, timeline: Timeline, straggler: Straggler | None, parts: Account) -> dict[str, float | None]:
    """Samples/s of all workers as they would have been, from the recorded steps; None where this run does not tell.

    Without the straggler: it computes like the median of the others, and all else stays (the method of Lin et al.,
    OSDI 2025, with recorded steps in place of operators), as far as processors allow. Where backup workers make up for
    it, that is not told: nobody waits for it. With twice the bandwidth the wire takes half as long, with one server
    more, on the host where that is best for the links, what they then take, and the server as much less as its share of
    the weights is, and a step as far as it waited for them: what no overlap could have hidden as well as what was not
    hidden though it could have been. Nothing is faster than the links allow.
    """
    rate = run.summary.samples_per_s or 0.0
    exposed, needed, server = parts.exposed_s, parts.needed_s["wire"], parts.needed_s["server"]

    def held(faster: float, bound: float | None) -> float:
        """At the bound at most, which what was measured proves to be no less."""
        return rate * faster if bound is None else min(rate * faster, max(rate, bound))

    bound, rates = network_bound(run), dict[str, float | None]()
    rates["without_straggler"] = None if run.manifest.backup else held(_speed_without(run, timeline, straggler), bound)
    step_s, spared = parts.step_s, min(exposed["wire"], needed / 2)
    rates["double_bandwidth"] = held(step_s / (step_s - spared), bound and 2 * bound) if needed else None
    rates["one_more_server"] = None
    if run.kind.servers and not {"server", "wire"} & parts.unknown.keys():
        left, host = min((float(wire(run, timeline, [host])), host) for host in run.manifest.hosts)
        spared = min(exposed["wire"], max(0.0, needed - left))
        spared += min(exposed["server"], server / (run.kind.servers + 1))
        rates["one_more_server"] = held(step_s / (step_s - spared), network_bound(run, [host]))
    return rates


def _speed_without(run: Run, timeline: Timeline, straggler: Straggler | None) -> float:
    """How many times as fast all workers together would be."""
    if not straggler:
        return 1.0
    worker = timeline.ranks.index(straggler.rank)
    others = np.delete(timeline.computed_s, worker, 0)
    if timeline.in_step:
        # It computes what the median of the others does in the step before: of two that are alike and vary, the slower
        # is slower than either, so the same step again would be too short.
        replaced = np.vstack([others, np.roll(np.median(others, axis=0), 1)])
        step = timeline.computed_s.mean() + timeline.waited_s.mean()
        return float(step / (step - (timeline.computed_s.max(0) - replaced.max(0)).mean()))
    samples, rates = timeline.means[:, SAMPLES], timeline.means[:, SAMPLES] * timeline.rates
    # Equals too wait for each other at the end of an epoch, as much shorter as their steps are.
    left = timeline.means[:, BETWEEN] / max(1.0, straggler.factor)
    if timeline.bound is None:
        free = samples / (1 / timeline.rates - waits_for_others(timeline) + left)
        free[worker] = np.median(np.delete(free, worker))
    else:
        free = samples / (_bounded_step_s(timeline, timeline.bound, worker) + left)
    speed = float(free.sum() / rates.sum())
    return speed * _processors_allow(run, dict(zip(timeline.ranks, free / rates, strict=True)), speed)


def _bounded_step_s(timeline: Timeline, bound: int, worker: int) -> float:
    """Mean seconds of a step, of all workers alike, where equals too wait for those more than `bound` steps behind.
    This worker computes like the median of the others.
    """
    fewest = min(map(len, timeline.each_step))
    waits = (timeline.means[:, WAITED] - timeline.means[:, BETWEEN]).min()  # but for others
    busy = np.stack([steps[:fewest, COMPUTED] + waits for steps in timeline.each_step])
    busy[worker] = np.roll(np.median(np.delete(busy, worker, 0), axis=0), 1)
    pushed = np.zeros_like(busy)  # when each worker has pushed its step
    begins = np.zeros(len(busy))  # of each worker's next step
    for step in range(fewest):
        pushed[:, step] = begins + busy[:, step]
        begins = np.maximum(pushed[:, step], pushed[:, step - bound].max() if step >= bound else 0.0)
    return float(begins.max() / fewest)


def _processors_allow(run: Run, times_as_fast: Mapping[int, float], otherwise: float) -> float:
    """The share of such speeds that the processors of the busiest host allow, where it is known; 1 at most. A worker
    that is not in step did nothing while it was slow, and others had its cores.

    Args:
        times_as_fast: of each worker.
        otherwise: of the servers.
    """
    seconds: dict[str, float] = defaultdict(float)  # of processor time, by host
    for process in run.summary.processes:
        rank = -1 if process.rank is None else process.rank
        seconds[process.host or ""] += process.cpu_s * times_as_fast.get(rank, otherwise)
    cores = {name: host.cores_usable or host.cores or 0 for name, host in run.manifest.hosts.items()}
    wall = run.summary.wall_s or 0
    return min([1.0, *(wall * cores[host] / spent for host, spent in seconds.items() if cores.get(host) and spent)])
