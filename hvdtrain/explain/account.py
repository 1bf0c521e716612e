"""Where the time of a worker's step went, and what the run would have been without this or that."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hvdtrain.explain.straggler import Straggler
from hvdtrain.explain.timeline import Timeline
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import Run
from hvdtrain.runs.schema import read_server_load

# The parts of a step, in the order in which they are told from each other, and what each is.
PARTS = {
    "computing": "data, forward, backward, optimizer and writing down what the step came to",
    "waiting_for_slowest": "until the slowest worker of the step, or in an epoch's last one, had computed too",
    "wire": "what the bytes of a step take on the measured links, as far as a step waited for them",
    "server": "what the busiest server's optimizer takes for the pushes of a step, as far as a step waited for it",
    "messages": "processor time of sending and receiving, beyond computing, as far as a step waited for it",
    "other_waiting": "latency, queues, and communication that was not hidden behind computing",
}


@dataclass(frozen=True)
class Account:
    """
    Attributes:
        step_s: mean seconds of a worker's step; the sum of the parts.
        parts: seconds of each of PARTS.
        unknown: parts that this run does not tell, which are 0, and why.
        needed_s: seconds that wire, server and messages take in a step, waited for or not.
    """

    step_s: float
    parts: dict[str, float]
    unknown: dict[str, str]
    needed_s: dict[str, float]


def account(run: Run, timeline: Timeline) -> Account:
    """Divide a worker's mean step. What it waited is given to the causes that are known, as far as it goes."""
    own, waited = np.mean([steps[:, 1:3].mean(0) for steps in timeline.each_step], axis=0).tolist()
    unknown: dict[str, str] = {}
    slowest = 0.0
    if timeline.in_step:
        behind = (timeline.own_s.max(0) - timeline.own_s).mean(1)
        slowest = float(np.minimum(behind, timeline.waited_s.mean(1)).mean())
    else:
        slowest = float(waits_for_others(timeline).mean())
    parts = {"computing": own, "waiting_for_slowest": slowest}
    left, needed_s = max(0.0, waited - slowest), {}
    for name, seconds in (("wire", _wire(run)), ("server", _server(run)), ("messages", _messages(run, own))):
        if isinstance(seconds, str):
            unknown[name], seconds = seconds, 0.0
        needed_s[name] = seconds
        parts[name] = min(left, seconds)
        left -= parts[name]
    parts["other_waiting"] = left
    return Account(sum(parts.values()), parts, unknown, needed_s)


def waits_for_others(timeline: Timeline) -> np.ndarray:
    """[workers] seconds of a step that each waited for others, of workers that are not in step: at the end of an epoch
    for their last shares and, where staleness has a bound, as long as it waited beyond the one that waited least, which
    is behind and never held back.
    """
    between = np.array([steps[:, 4].mean() for steps in timeline.each_step])
    waits = np.array([steps[:, 2].mean() for steps in timeline.each_step]) - between
    return between + (0.0 if timeline.bound is None else waits - waits.min())


def _wire(run: Run) -> float | str:
    if run.kind.workers == 1 and not run.kind.servers:
        return 0.0
    bound = network_bound(run)
    if not bound:
        one_host = len(run.manifest.hosts) == 1
        return 0.0 if one_host else "the network between the hosts was not measured"
    return (run.manifest.global_batch or 0) / bound


def _server(run: Run) -> float | str:
    if not run.kind.servers:
        return 0.0
    load = [read_server_load(run.folder, rank) for rank in range(run.kind.servers)]
    known = [last.applying_s for last in load if last]
    if not known or not run.summary.steps:
        return "there are no metrics of servers"
    return max(known) / run.summary.steps


def _messages(run: Run, computing_s: float) -> float | str:
    threads, steps = run.manifest.threads_per_worker, run.summary.steps
    workers = [process for process in run.summary.processes if process.role == "worker"]
    if threads != 1 or not workers or not steps:
        return "processor time tells computing from messages only where a worker computes with one thread"
    if run.manifest.slow and run.manifest.slow.asked not in ("", "none"):
        return "a worker that is made slow by --slow sleeps, and its processor time tells nothing"
    spent = sum(process.cpu_s for process in workers) / run.kind.workers / steps
    return max(0.0, spent - computing_s)


def what_if(run: Run, timeline: Timeline, straggler: Straggler | None, found: Account) -> dict[str, float | None]:
    """Samples/s of all workers as they would have been, from the recorded steps; None where this run does not tell.

    Without the straggler: it computes like the median of the others, and all else stays (the method of Lin et al.,
    OSDI 2025, with recorded steps in place of operators), as far as processors allow. Where backup workers make up for
    it, that is not told: nobody waits for it. With twice the bandwidth the wire takes half as long, with one server
    more wire and server as much less as its share of the weights is, and a step as far as it waited for them.
    """
    rate = run.summary.samples_per_s
    if not rate:
        return dict.fromkeys(("without_straggler", "double_bandwidth", "one_more_server"))
    step, parts, servers = found.step_s, found.parts, run.kind.servers
    wire, server = found.needed_s["wire"], found.needed_s["server"]
    spared = {
        "double_bandwidth": min(parts["wire"], wire / 2) if wire else None,
        "one_more_server": (
            min(parts["wire"], wire / (servers + 1)) + min(parts["server"], server / (servers + 1)) if servers else None
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
