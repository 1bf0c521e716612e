"""The report's verdict: ring all-reduce or a parameter server, on what evidence, and what that evidence lacks.

It is reached as figures, which README.md beside this file describes; `headline.py` puts them into words.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from hvdtrain.report.columns import cpu_s_per_1000_samples, samples_to_target
from hvdtrain.report.paired import (
    CONFIDENCE,
    LEAST_REPEATS,
    Estimate,
    estimate,
    is_level,
    leads,
    log_ratios,
    pairs,
    repeats_needed,
)
from hvdtrain.runs.read import Kind, Run

WINNER, NO_WINNER, UNKNOWN, NOTHING = "winner", "no winner", "not yet known", "nothing to compare"
AS_GOOD, WORSE, NOT_SHOWN = "as good", "worse", "not shown"
NETWORK_DIFFERS = 1.5  # times: what is measured of one network varies less
ByKind = Mapping[Kind, Sequence[Run]]


class Margins(NamedTuple):
    """What counts as a difference: of speed as a share, of accuracy in absolute terms."""

    speed: float = 0.03
    accuracy: float = 0.01


DEFAULT = Margins()


class Quality(NamedTuple):
    """How a kind's validation accuracy stands to that of the best: its difference, paired by repeat."""

    accuracy: float | None
    difference: Estimate | None
    state: str


@dataclass(frozen=True)
class Answer:
    """Which of two kinds of runs is faster.

    Attributes:
        basis: what the two have as many of: workers or processes; or what speed is counted by: processor-seconds.
        lead: of the logarithm of the ratio of their speeds; its mean is not below 0.
        confidence: of the interval of the lead.
        best: which kind is the most accurate of those compared, the baseline included; None if none was measured.
        repeats_needed: in all, to settle who won; None where no reasonable number would.
    """

    basis: str
    faster: Kind
    slower: Kind
    lead: Estimate
    confidence: float
    outcome: str
    best: Kind | None
    qualities: dict[Kind, Quality]
    repeats_needed: int | None

    @property
    def pair(self) -> tuple[Kind, Kind]:
        return self.faster, self.slower

    @property
    def winner(self) -> Kind | None:
        return self.faster if self.outcome == WINNER else None


def ratio(logs: Estimate) -> tuple[float, float | None, float | None]:
    """The geometric mean of ratios and its interval, which one repeat does not have."""
    mean, low, high = (math.exp(min(max(x, -700.0), 700.0)) for x in (logs.mean, logs.low, logs.high))
    return (mean, low, high) if logs.n > 1 else (mean, None, None)


def speed(run: Run) -> float | None:
    """Samples/s."""
    return run.summary.samples_per_s


def processor_speed(run: Run) -> float | None:
    """Samples per processor-second of all processes, servers included; None where that was not recorded."""
    spent = cpu_s_per_1000_samples(run)
    return 1000 / spent if spent else None


def reach_answers(by_kind: ByKind, margins: Margins) -> list[Answer]:
    """What the finished runs of a comparison say: the answer that counts, then those on another basis.

    The pair is Horovod's ring (DDP where there is no such run) and the fastest parameter server, on the largest number
    of workers that both have; else of processes. Where there is no such pair, it is the two fastest modes on equally
    many workers. A server that is shown to be less accurate is left out while there is another.
    """
    timed = {kind: runs for kind, runs in by_kind.items() if kind.mode != "single" and any(map(speed, runs))}
    bases: dict[str, Callable[[Kind], int]] = {
        "workers": lambda kind: kind.workers,
        "processes": lambda kind: kind.workers + kind.servers,
    }
    answers = [
        _decide(basis, speed, *sides, _with_single(by_kind, timed, size, sides[0][0]), margins)
        for basis, size in bases.items()
        if (sides := _ring_and_servers(timed, size))
    ]
    if not any(answers) and (two := _two_fastest(timed)):
        answers = [_decide("workers", speed, *two, _with_single(by_kind, timed, bases["workers"], two[0][0]), margins)]
    found = [answer for answer in answers if answer]
    if found and found[0].basis == "workers":
        first = found[0]
        of_pair = {kind: by_kind[kind] for kind in first.qualities}
        by_time = _decide("processor-seconds", processor_speed, [first.faster], [first.slower], of_pair, margins)
        found += [by_time] if by_time else []
    return found


def _ring_and_servers(timed: ByKind, size: Callable[[Kind], int]) -> tuple[list[Kind], list[Kind]] | None:
    ring_mode = "allreduce" if any(kind.mode == "allreduce" for kind in timed) else "ddp"
    for ring in sorted((kind for kind in timed if kind.mode == ring_mode), key=size, reverse=True):
        servers = [kind for kind in timed if kind.servers and size(kind) == size(ring)]
        servers = [kind for kind in servers if ran_alike(timed[kind], timed[ring])]
        if servers:
            return [ring], servers
    return None


def _two_fastest(timed: ByKind) -> tuple[list[Kind], list[Kind]] | None:
    for workers in sorted({kind.workers for kind in timed}, reverse=True):
        ranked = sorted((kind for kind in timed if kind.workers == workers), key=lambda kind: -_typical(timed[kind]))
        alike = [kind for kind in ranked if ran_alike(timed[kind], timed[ranked[0]])]
        if len(alike) > 1:
            return alike[:1], alike[1:2]
    return None


def _typical(runs: Sequence[Run]) -> float:
    """The mean logarithm of the speeds."""
    return fmean(math.log(value) for run in runs if (value := speed(run)))


def ran_alike(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Whether two kinds of runs were started alike, and on the same one host or on hosts of the same network, over
    which their workers were spread alike.

    Of several hosts one kind may use more, as n workers and a server do beside n workers.
    """
    hosts, other_hosts = _hosts(runs), _hosts(others)
    if (len(hosts) > 1) != (len(other_hosts) > 1) or not (hosts <= other_hosts or other_hosts <= hosts):
        return False
    if len(hosts) > 1 and not (_spread_alike(runs[0], others[0]) and same_network([*runs, *others])):
        return False
    return len({run.manifest.starter for run in (*runs, *others)}) == 1


def _spread_alike(run: Run, other: Run) -> bool:
    """Whether hosts have as many workers, or as many ranks, in both; true where that was not recorded."""

    def counts(of: Run, first: int) -> list[int]:
        found = (sum(rank >= first for rank in host.ranks) for host in of.manifest.hosts.values())
        return sorted(filter(None, found))

    pairs = [(counts(run, run.kind.servers), counts(other, other.kind.servers)), (counts(run, 0), counts(other, 0))]
    return any(not one or not two or one == two for one, two in pairs)


def same_network(runs: Sequence[Run]) -> bool:
    """Whether all that was measured of the hosts' network is alike, whatever its interface is called."""
    measured = [[link.gbit_s for link in run.manifest.network.pairs if link.gbit_s] for run in runs]
    speeds = [median(found) for found in measured if found]
    return not speeds or max(speeds) <= NETWORK_DIFFERS * min(speeds)


def _hosts(runs: Sequence[Run]) -> set[str]:
    return {name for run in runs for name in run.manifest.hardware.hosts}


def _with_single(by_kind: ByKind, timed: ByKind, size: Callable[[Kind], int], one: Kind) -> ByKind:
    """The kinds of the same size that ran as this one, and the baseline: accuracy is compared among them."""
    chosen = {kind for kind in timed if size(kind) == size(one) and ran_alike(timed[kind], timed[one])}
    return {kind: runs for kind, runs in by_kind.items() if kind.mode == "single" or kind in chosen}


def _decide(
    basis: str, figure: Callable[[Run], float | None], ring: list[Kind], servers: list[Kind], among: ByKind,
    margins: Margins,
) -> Answer | None:  # fmt: skip
    """The answer for the ring and the fastest of the servers, or None where they have no repeat in common."""
    best, qualities = compare_accuracy(among, margins.accuracy)
    servers = [kind for kind in servers if qualities[kind].state != WORSE] or servers
    faster, slower = ring[0], max(servers, key=lambda kind: _typical(among[kind]))
    logs = log_ratios(among[faster], among[slower], figure)
    if not logs:
        return None
    if sum(logs) < 0:
        faster, slower, logs = slower, faster, [-log for log in logs]
    # The fastest of m servers had m chances to look faster than the ring (Bonferroni); the ring had one against them.
    confidence = 1 - (1 - CONFIDENCE) / (len(servers) if faster in servers else 1)
    lead, quality = estimate(logs, confidence), qualities[faster]
    margin = math.log1p(margins.speed)
    needed = repeats_needed(lead, 0.0 if lead.mean >= margin else margin, confidence)
    if quality.state == WORSE or is_level(lead, margins.speed):
        outcome, needed = NO_WINNER, lead.n
    elif leads(lead, margins.speed) and quality.state == AS_GOOD:
        outcome, needed = WINNER, lead.n
    else:
        outcome = UNKNOWN
        more = repeats_needed(quality.difference, -margins.accuracy) if quality.difference else None
        needed = max(needed, more) if needed and more else None
    return Answer(basis, faster, slower, lead, confidence, outcome, best, qualities, needed)


def compare_accuracy(by_kind: ByKind, margin: float) -> tuple[Kind | None, dict[Kind, Quality]]:
    """The most accurate kind, and how every kind stands to it.

    A kind is as good if the interval of its difference to the best, paired by repeat, is above -margin
    (non-inferiority), and worse if all of it is below, in LEAST_REPEATS at least. Runs keep no predictions, so images
    are not paired.
    """

    def accuracy(run: Run) -> float | None:
        return run.summary.val_accuracy

    means = {
        kind: fmean(measured)
        for kind, runs in by_kind.items()
        if (measured := [value for run in runs if (value := accuracy(run)) is not None])
    }
    best = max(means, key=lambda kind: means[kind]) if means else None
    qualities = {}
    for kind, runs in by_kind.items():
        found = pairs(runs, by_kind[best], accuracy) if best else []
        difference = estimate([a - b for a, b in found]) if found else None
        has_repeats, state = difference and difference.n >= LEAST_REPEATS, NOT_SHOWN
        if kind == best or (difference and has_repeats and difference.low > -margin):
            state = AS_GOOD
        elif difference and has_repeats and difference.high < -margin:
            state = WORSE
        qualities[kind] = Quality(means.get(kind), difference, state)
    return best, qualities


def effects(by_kind: ByKind, answer: Answer) -> tuple[Kind, dict[Kind, Estimate]]:
    """The ring of the answer, else its faster side, and the logarithms of the other kinds' speeds over its own."""
    reference = answer.slower if answer.faster.servers and not answer.slower.servers else answer.faster
    logs = {
        kind: log_ratios(by_kind[kind], by_kind[reference], speed) for kind in answer.qualities if kind != reference
    }
    return reference, {kind: estimate(found) for kind, found in logs.items() if found}


def times_to_target(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, Estimate]:
    """Logarithms of ratios of the time to the target accuracy and of its two factors; empty unless all runs got there.

    Without those that never did, the others would look better than they are.
    """

    def time(run: Run) -> float | None:
        return run.summary.time_to_target_s

    def seconds_per_sample(run: Run) -> float | None:
        seconds, samples = time(run), samples_to_target(run)
        return seconds / samples if seconds and samples else None

    figures = {"seconds": time, "seconds_per_sample": seconds_per_sample, "samples": samples_to_target}
    if not all(figure(run) for run in (*runs, *others) for figure in figures.values()):
        return {}
    found = {name: log_ratios(runs, others, figure) for name, figure in figures.items()}
    return {name: estimate(logs) for name, logs in found.items() if logs}
