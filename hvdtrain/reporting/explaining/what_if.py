"""How fast a run would have been otherwise, from its recorded steps.

The cases are: without the straggler, with twice the bandwidth, and with one more server.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from hvdtrain.reporting.explaining.account import Account, seconds_on_links, waits_for_others
from hvdtrain.reporting.explaining.straggler import Straggler
from hvdtrain.reporting.explaining.timeline import BETWEEN, COMPUTED, SAMPLES, WAITED, Timeline
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import Run


def what_if(
    run: Run, timeline: Timeline, straggler: Straggler | None, account: Account
) -> dict[str, float | None]:
    """Returns the samples/s of all workers as they would have been; None if this run does not tell.

    `without_straggler`: the straggler computes like the median of the others, and all else stays,
    as far as processors allow. This is the method of Lin et al., OSDI 2025, with recorded steps in
    place of operators. It is not told where backup workers make up for the straggler, since nobody
    waits for it.

    `double_bandwidth`: the links take half as long, and a step is shorter as far as it waited for
    them.

    `one_more_server`: the links take what they would take with one more server, on the host where
    that is best for them. The servers take less, as the share of each in the weights is smaller.
    Again a step is shorter as far as it waited for them.

    Nothing is faster than the links allow.
    """
    rate = run.summary.samples_per_s or 0.0
    bound = network_bound(run)
    rates: dict[str, float | None] = {
        "without_straggler": None,
        "double_bandwidth": None,
        "one_more_server": None,
    }
    if not run.manifest.backup:
        faster = _speed_without(run, timeline, straggler)
        rates["without_straggler"] = _at_most_bound(rate, faster, bound)
    links_s = account.needed_s["links"]
    if links_s:
        spared_s = min(account.exposed_s["links"], links_s / 2)
        faster = account.step_s / (account.step_s - spared_s)
        doubled = 2 * bound if bound else bound
        rates["double_bandwidth"] = _at_most_bound(rate, faster, doubled)
    if run.kind.servers and not {"server", "links"} & account.unknown.keys():
        host, spared_s = _one_more_server(run, timeline, account)
        faster = account.step_s / (account.step_s - spared_s)
        bound_then = network_bound(run, [host])
        rates["one_more_server"] = _at_most_bound(rate, faster, bound_then)
    return rates


def _at_most_bound(rate: float, faster: float, bound: float | None) -> float:
    """Returns a rate made faster, at most at the bound.

    The measured rate proves that the bound is no less.

    Args:
        rate: the measured samples/s.
        faster: by which factor.
        bound: the samples/s that the links allow; None if that is not known.
    """
    if bound is None:
        return rate * faster
    return min(rate * faster, max(rate, bound))


def _one_more_server(run: Run, timeline: Timeline, account: Account) -> tuple[str, float]:
    """Returns the best host of one more server, and how many seconds of a step that spares."""
    before_s = float(seconds_on_links(run, timeline))
    after_s, host = min(
        (float(seconds_on_links(run, timeline, [host])), host) for host in run.manifest.hosts
    )
    spared_s = 0.0
    if before_s:
        spared_share = max(0.0, 1 - after_s / before_s)
        spared_s = min(account.exposed_s["links"], account.needed_s["links"] * spared_share)
    spared_by_server_s = account.needed_s["server"] / (run.kind.servers + 1)
    return host, spared_s + min(account.exposed_s["server"], spared_by_server_s)


def _speed_without(run: Run, timeline: Timeline, straggler: Straggler | None) -> float:
    """Returns how many times as fast all workers together would be without the straggler."""
    if not straggler:
        return 1.0
    worker = timeline.ranks.index(straggler.rank)
    if timeline.in_step:
        return _speed_in_step(timeline, worker)
    samples = timeline.means[:, SAMPLES]
    rates = samples * timeline.rates
    # Equals too wait for each other at the end of an epoch, as much shorter as their steps are.
    between = timeline.means[:, BETWEEN] / max(1.0, straggler.factor)
    if timeline.bound is None:
        busy_s = 1 / timeline.rates - waits_for_others(timeline)
        free_rates = samples / (busy_s + between)
        free_rates[worker] = np.median(np.delete(free_rates, worker))
    else:
        free_rates = samples / (_bounded_step_s(timeline, timeline.bound, worker) + between)
    speed = float(free_rates.sum() / rates.sum())
    speed_of_workers = dict(zip(timeline.ranks, free_rates / rates, strict=True))
    return speed * _processors_allow(run, speed_of_workers, speed)


def _speed_in_step(timeline: Timeline, worker: int) -> float:
    """Returns how many times as fast workers in step would be if this one were like the others."""
    others = np.delete(timeline.computed_s, worker, 0)
    # The worker computes what the median of the others does in the step before. In the same step it
    # would not be slower than the slowest of the others, as equals sometimes are.
    like_others = np.roll(np.median(others, axis=0), 1)
    replaced = np.vstack([others, like_others])
    step_s = timeline.computed_s.mean() + timeline.waited_s.mean()
    spared_s = (timeline.computed_s.max(0) - replaced.max(0)).mean()
    return float(step_s / (step_s - spared_s))


def _bounded_step_s(timeline: Timeline, bound: int, worker: int) -> float:
    """Returns the mean seconds of a step if all workers were alike and staleness had its bound.

    Equals too wait for a worker that is more than `bound` steps behind.

    Args:
        timeline: the steps of the run.
        bound: how many steps a worker may be ahead.
        worker: the row of a worker that computes like the median of the others.
    """
    fewest = min(map(len, timeline.each_step))
    # What the worker waited that waited least, which was not for others.
    waited_s = (timeline.means[:, WAITED] - timeline.means[:, BETWEEN]).min()
    busy_s = np.stack([steps[:fewest, COMPUTED] + waited_s for steps in timeline.each_step])
    busy_s[worker] = np.roll(np.median(np.delete(busy_s, worker, 0), axis=0), 1)
    # When each worker has pushed its step, and when it begins the next.
    pushed = np.zeros_like(busy_s)
    begins = np.zeros(len(busy_s))
    for step in range(fewest):
        pushed[:, step] = begins + busy_s[:, step]
        slowest = pushed[:, step - bound].max() if step >= bound else 0.0
        begins = np.maximum(pushed[:, step], slowest)
    return float(begins.max() / fewest)


def _processors_allow(run: Run, speed_of_workers: Mapping[int, float], speed: float) -> float:
    """Returns the share of such speeds that the processors of the busiest host allow, 1 at most.

    A worker that is not in step did nothing while it was slow, and others had its cores. Hosts
    whose cores are not known are left out.

    Args:
        run: the run.
        speed_of_workers: how many times as fast each worker would be, by rank.
        speed: how many times as fast servers would be.
    """
    cpu_s: dict[str, float] = defaultdict(float)
    for process in run.summary.processes:
        rank = -1 if process.rank is None else process.rank
        cpu_s[process.host or ""] += process.cpu_s * speed_of_workers.get(rank, speed)
    wall_s = run.summary.wall_s or 0
    share = 1.0
    for name, host in run.manifest.hosts.items():
        cores = host.cores_usable or host.cores or 0
        spent_s = cpu_s.get(name, 0.0)
        if cores and spent_s:
            share = min(share, wall_s * cores / spent_s)
    return share
