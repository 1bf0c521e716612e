"""What a run would have been without this or that, from its recorded steps."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from hvdtrain.explain.account import Account, waits_for_others
from hvdtrain.explain.straggler import Straggler
from hvdtrain.explain.timeline import Timeline
from hvdtrain.runs.read import Run


def what_if(run: Run, timeline: Timeline, straggler: Straggler | None, found: Account) -> dict[str, float | None]:
    """Samples/s of all workers as they would have been, from the recorded steps; None where this run does not tell.

    Without the straggler: it computes like the median of the others, and all else stays (the method of Lin et al.,
    OSDI 2025, with recorded steps in place of operators), as far as processors allow. Where backup workers make up for
    it, that is not told: nobody waits for it. With twice the bandwidth the wire takes half as long, with one server
    more wire and server as much less as its share of the weights is, and a step as far as it waited for them: what no
    overlap could have hidden as well as what was not hidden though it could have been.
    """
    rate = run.summary.samples_per_s
    if not rate:
        return dict.fromkeys(("without_straggler", "double_bandwidth", "one_more_server"))
    step, exposed, servers = found.step_s, found.exposed_s, run.kind.servers
    wire, server = found.needed_s["wire"], found.needed_s["server"]
    spared = {
        "double_bandwidth": min(exposed["wire"], wire / 2) if wire else None,
        "one_more_server": (
            min(exposed["wire"], wire / (servers + 1)) + min(exposed["server"], server / (servers + 1))
            if servers and "server" not in found.unknown
            else None
        ),
    }
    without = None if run.manifest.backup else rate * _speed_without(run, timeline, straggler)
    return {"without_straggler": without} | {
        name: rate * step / (step - seconds) if seconds is not None else None for name, seconds in spared.items()
    }


def _speed_without(run: Run, timeline: Timeline, straggler: Straggler | None) -> float:
    """How many times as fast all workers together would be."""
    if not straggler:
        return 1.0
    worker = timeline.ranks.index(straggler.rank)
    others = np.delete(timeline.own_s, worker, 0)
    if timeline.in_step:
        # It computes what the median of the others does in the step before: of two that are alike and vary, the slower
        # is slower than either, so the same step again would be too short.
        replaced = np.vstack([others, np.roll(np.median(others, axis=0), 1)])
        step = timeline.own_s.mean() + timeline.waited_s.mean()
        return float(step / (step - (timeline.own_s.max(0) - replaced.max(0)).mean()))
    seconds = np.array([steps[:, 1:3].sum(1).mean() for steps in timeline.each_step])
    samples = np.array([steps[:, 3].mean() for steps in timeline.each_step])
    # Equals too wait for each other at the end of an epoch, as much shorter as their steps are.
    left = np.array([steps[:, 4].mean() for steps in timeline.each_step]) / max(1.0, straggler.factor)
    rates = samples / seconds
    if timeline.bound is None:
        free = samples / (seconds - waits_for_others(timeline) + left)
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
    waits = min((steps[:, 2] - steps[:, 4]).mean() for steps in timeline.each_step)  # but for others
    busy = np.stack([steps[:fewest, 1] + waits for steps in timeline.each_step])
    busy[worker] = np.roll(np.median(np.delete(busy, worker, 0), axis=0), 1)
    pushed = np.zeros_like(busy)  # when each worker has pushed its step
    goes_on = np.zeros(len(busy))
    for step in range(fewest):
        pushed[:, step] = goes_on + busy[:, step]
        goes_on = np.maximum(pushed[:, step], pushed[:, step - bound].max() if step >= bound else 0.0)
    return float(goes_on.max() / fewest)


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
