"""The report's first lines: which side trained faster, by how much, how sure that is, and the accuracy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hvdtrain.report.cells import cell, count, figure
from hvdtrain.report.tables import Group, Spread

RING = ("allreduce", "ddp")  # gradients travel round all workers; the ps- modes have servers


@dataclass(frozen=True)
class Answer:
    """A headline, and the sentences that back it."""

    headline: str
    sentences: list[str]


def answer(groups: Sequence[Group], target: float | None, validation_samples: int | None) -> Answer:
    """What these groups say about the question, and no more than they say."""
    timed = [group for group in groups if _speed(group).median > 0]
    if len(timed) < 2:
        only = "".join(f": {cell(group, 'samples_per_s')[0]} samples/s with {group.kind.label}" for group in timed)
        return Answer(f"Nothing to compare yet{only}.", ["Add runs of another mode, or of another number of workers."])
    fast, slow = _pair(timed)
    sentences = [_among_equals(timed, fast), _how_sure(fast, slow), _against_one(timed, fast)]
    sentences += [_target(groups, fast, target), _accuracy(groups, validation_samples)]
    return Answer(_headline(fast, slow, groups), [sentence for sentence in sentences if sentence])


def _speed(group: Group) -> Spread:
    return group["samples_per_s"] or Spread(0.0, 0.0, 0.0, 0)


def _pair(groups: Sequence[Group]) -> tuple[Group, Group]:
    """The two that the answer is about, the faster first.

    Ring against servers, the best of each, on the most workers that both have; without such a pair the
    fastest kind against the next.
    """
    ring = [group for group in groups if group.kind.mode in RING]
    served = [group for group in groups if group.kind.servers]
    sizes = {group.kind.workers for group in ring} & {group.kind.workers for group in served}
    sides = [[group for group in side if group.kind.workers == max(sizes, default=0)] for side in (ring, served)]
    if sizes:
        best = [max(side, key=lambda group: _speed(group).median) for side in sides]
        fast, slow = sorted(best, key=lambda group: -_speed(group).median)
        return fast, slow
    fast, slow = sorted(groups, key=lambda group: -_speed(group).median)[:2]
    return fast, slow


def _headline(fast: Group, slow: Group, groups: Sequence[Group]) -> str:
    lead = _speed(fast).median / _speed(slow).median
    did = f"{fast.kind.label} did {lead:.2f} times the samples/s of {slow.kind.label}"
    names = {True: "Ring all-reduce", False: "The parameter server"}
    both = _is_ring(fast) != _is_ring(slow) and bool(fast.kind.servers or slow.kind.servers)
    side = f"{names[_is_ring(fast)]} was faster here" if both else f"{fast.kind.label} was fastest"
    if not _repeated(fast, slow):
        once = [group.kind.label for group in (fast, slow) if _speed(group).n < 2]
        runs = "in one run each" if len(once) > 1 else f"with one run of {once[0]}"
        text = f"No winner yet: {did}, {runs}"
    elif _speed(fast).low > _speed(slow).high:
        text = f"{side}: {did}"
    else:
        text = f"No clear winner: {did}, but their repeats overlap"
    sooner = _sooner(fast, slow, groups)
    return text + (f". But {sooner.kind.label} reached the target accuracy sooner." if sooner else ".")


def _is_ring(group: Group) -> bool:
    return group.kind.mode in RING


def _repeated(*groups: Group) -> bool:
    return all(_speed(group).n > 1 for group in groups)


def _sooner(fast: Group, slow: Group, groups: Sequence[Group]) -> Group | None:
    """The slower side's first kind to the target on as many workers, where it beats the faster side's."""

    def time(group: Group) -> float:
        found = group["time_to_target_s"]
        return found.median if found and found.n == group.n else math.inf

    sides = [
        [g for g in groups if g.kind.workers == side.kind.workers and _is_ring(g) == _is_ring(side)]
        for side in (fast, slow)
    ]
    first, other = (min(side, key=time) for side in sides)
    return other if time(other) < time(first) else None


def _told(group: Group, name: str) -> str:
    main, detail = cell(group, name)
    return f"{main} ({detail}) with {group.kind.label}" if detail else f"{main} with {group.kind.label}"


def _among_equals(groups: Sequence[Group], fast: Group) -> str:
    same = [group for group in groups if group.kind.workers == fast.kind.workers]
    same.sort(key=lambda group: -_speed(group).median)
    ns = sorted({group.n for group in same})
    runs = f"medians of {' or '.join(map(str, ns))} repeats with their range" if ns[-1] > 1 else "one run each"
    told = ", ".join(_told(group, "samples_per_s") for group in same)
    return f"Samples/s on {count(fast.kind.workers, 'worker')}: {told}; {runs}."


def _how_sure(fast: Group, slow: Group) -> str:
    a, b = _speed(fast), _speed(slow)
    names = f"{fast.kind.label} and {slow.kind.label}"
    if not _repeated(fast, slow):
        return "One run cannot tell a difference from chance: add --repeats 3 or more before you rely on it."
    if a.low <= b.high:
        return f"The ranges of {names} overlap, so these {a.n} and {b.n} runs show no sure difference."
    # Wilcoxon's rank-sum test, exact: of the C(n+m, n) orders of the runs, two separate the groups.
    odds = math.comb(a.n + b.n, a.n) / 2
    return (
        f"Each of the {a.n} runs of {fast.kind.label} was faster than each of the {b.n} of {slow.kind.label} "
        f"({a.low / b.high:.2f} to {a.high / b.low:.2f} times, run against run). Were the two equally fast, "
        f"so clean a split would come by chance once in {odds:.0f} times."
    )


def _against_one(groups: Sequence[Group], fast: Group) -> str:
    single = next((group for group in groups if group.kind.mode == "single"), None)
    if not single or single is fast:
        return ""
    ratio = _speed(fast).median / _speed(single).median
    one = figure("samples_per_s", _speed(single).median)
    if ratio <= 1:
        return f"No gain over one worker: single did {one} samples/s."
    main = cell(fast, "scaling_efficiency")[0]
    return (
        f"{fast.kind.label} was {ratio:.2f} times as fast as one worker (single, {one} samples/s): "
        f"a scaling efficiency of {main}."
    )


def _target(groups: Sequence[Group], fast: Group, target: float | None) -> str:
    if not target:
        return ""
    if not any(group["time_to_target_s"] for group in groups):
        return f"No run reached the target accuracy of {target:g}."
    # The whole grid is in the table; here are the ones that the answer is about.
    near = [group for group in groups if group.kind.workers == fast.kind.workers or group.kind.mode == "single"]
    reached = sorted((found.median, _told(g, "time_to_target_s")) for g in near if (found := g["time_to_target_s"]))
    never = [group.kind.label for group in near if not group["time_to_target_s"]]
    told = [", ".join(text for _, text in reached)] if reached else []
    told += [f"never by {', '.join(never)}"] if never else []
    return f"Training time until {target:g} validation accuracy: {'; '.join(told)}."


def _accuracy(groups: Sequence[Group], images: int | None) -> str:
    measured = sorted((found.median, group.kind.label) for group in groups if (found := group["val_accuracy"]))
    if len(measured) < 2 or not images:
        return ""
    (low, lowest), (high, highest) = measured[0], measured[-1]
    # Two standard errors of a difference of two proportions; the Agresti-Coull centre keeps it above 0 near
    # 1.
    share = (fmean(value for value, _ in measured) * images + 2) / (images + 4)
    noise = 2 * math.sqrt(2 * share * (1 - share) / images)
    told = f"from {figure('val_accuracy', low)} ({lowest}) to {figure('val_accuracy', high)} ({highest})"
    about = f"on {images:,} images two equally good models differ by up to {noise:.3f} (two standard errors)"
    if high - low <= noise:
        return f"Final validation accuracy is the same within noise: {told}; {about}."
    return f"Final validation accuracy differs: {told}; {about}, which is less."
