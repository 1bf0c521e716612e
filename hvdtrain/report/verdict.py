"""The report's verdict: which side trained faster, by how much, how sure that is, and how accurate the models are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hvdtrain.report.formatting import format_cell, format_figure, with_noun
from hvdtrain.report.results import Group, Spread

RING_MODES = ("allreduce", "ddp")


@dataclass(frozen=True)
class Verdict:
    """A headline, and the sentences that support it."""

    headline: str
    sentences: list[str]


def reach_verdict(groups: Sequence[Group], target: float | None, validation_samples: int | None) -> Verdict:
    """Ring all-reduce or a parameter server, as far as these groups show it.

    Args:
        target: the accuracy whose time to reach is compared, if any.
        validation_samples: how many images accuracy was measured on.
    """
    timed = [group for group in groups if _speed(group).median > 0]
    if len(timed) < 2:
        speeds = [f": {format_cell(group, 'samples_per_s')[0]} samples/s with {group.kind.label}" for group in timed]
        advice = "Add runs of another mode, or of another number of workers."
        return Verdict(f"Nothing to compare yet{''.join(speeds)}.", [advice])
    faster, slower = _two_sides(timed)
    sentences = [_speeds(timed, faster), _certainty(faster, slower), _gain_over_single(timed, faster)]
    sentences += [_times_to_target(groups, faster, target), _final_accuracies(groups, validation_samples)]
    return Verdict(_headline(faster, slower, groups), [sentence for sentence in sentences if sentence])


def _speed(group: Group) -> Spread:
    return group["samples_per_s"] or Spread(0.0, 0.0, 0.0, 0)


def _two_sides(groups: Sequence[Group]) -> tuple[Group, Group]:
    """The two groups that the headline compares, the faster first.

    They are the fastest ring mode and the fastest parameter-server mode, on the largest number of workers that both
    have. Where there is no such pair, they are the fastest two of all groups.
    """
    ring = [group for group in groups if _is_ring(group)]
    served = [group for group in groups if group.kind.servers]
    common_sizes = {group.kind.workers for group in ring} & {group.kind.workers for group in served}
    if common_sizes:
        sides = [[group for group in side if group.kind.workers == max(common_sizes)] for side in (ring, served)]
        best = [max(side, key=lambda group: _speed(group).median) for side in sides]
        faster, slower = sorted(best, key=lambda group: -_speed(group).median)
        return faster, slower
    faster, slower = sorted(groups, key=lambda group: -_speed(group).median)[:2]
    return faster, slower


def _headline(faster: Group, slower: Group, groups: Sequence[Group]) -> str:
    ratio = _speed(faster).median / _speed(slower).median
    lead = f"{faster.kind.label} did {ratio:.2f} times the samples/s of {slower.kind.label}"
    side = "Ring all-reduce" if _is_ring(faster) else "The parameter server"
    are_opposite = _is_ring(faster) != _is_ring(slower) and bool(faster.kind.servers or slower.kind.servers)
    winner = f"{side} was faster here" if are_opposite else f"{faster.kind.label} was fastest"
    if not _have_repeats(faster, slower):
        once = [group.kind.label for group in (faster, slower) if _speed(group).n < 2]
        runs = "in one run each" if len(once) > 1 else f"with one run of {once[0]}"
        text = f"No winner yet: {lead}, {runs}"
    elif _speed(faster).low > _speed(slower).high:
        text = f"{winner}: {lead}"
    else:
        text = f"No clear winner: {lead}, but their repeats overlap"
    sooner = _sooner_at_target(faster, slower, groups)
    return text + (f". But {sooner.kind.label} reached the target accuracy sooner." if sooner else ".")


def _is_ring(group: Group) -> bool:
    return group.kind.mode in RING_MODES


def _have_repeats(*groups: Group) -> bool:
    return all(_speed(group).n > 1 for group in groups)


def _sooner_at_target(faster: Group, slower: Group, groups: Sequence[Group]) -> Group | None:
    """The slower side's group that reaches the target first, if that is before any group of the faster side does.

    Sides are ring or not, on as many workers as the two groups that the headline compares.
    """

    def time(group: Group) -> float:
        spread = group["time_to_target_s"]
        return spread.median if spread and spread.n == group.n else math.inf

    sides = [
        [g for g in groups if g.kind.workers == side.kind.workers and _is_ring(g) == _is_ring(side)]
        for side in (faster, slower)
    ]
    faster_first, slower_first = (min(side, key=time) for side in sides)
    return slower_first if time(slower_first) < time(faster_first) else None


def _with_label(group: Group, name: str) -> str:
    median, detail = format_cell(group, name)
    return f"{median} ({detail}) with {group.kind.label}" if detail else f"{median} with {group.kind.label}"


def _speeds(groups: Sequence[Group], faster: Group) -> str:
    """The speeds of all groups on as many workers as the fastest has."""
    same_size = [group for group in groups if group.kind.workers == faster.kind.workers]
    same_size.sort(key=lambda group: -_speed(group).median)
    ns = sorted({group.n for group in same_size})
    runs = f"medians of {' or '.join(map(str, ns))} repeats with their range" if ns[-1] > 1 else "one run each"
    speeds = ", ".join(_with_label(group, "samples_per_s") for group in same_size)
    return f"Samples/s on {with_noun(faster.kind.workers, 'worker')}: {speeds}; {runs}."


def _certainty(faster: Group, slower: Group) -> str:
    a, b = _speed(faster), _speed(slower)
    names = f"{faster.kind.label} and {slower.kind.label}"
    if not _have_repeats(faster, slower):
        return "One run cannot tell a difference from chance: add --repeats 3 or more before you rely on it."
    if a.low <= b.high:
        return f"The ranges of {names} overlap, so these {a.n} and {b.n} runs show no sure difference."
    # Wilcoxon's rank-sum test, exact: 2 of the C(n+m, n) orders of the runs by speed separate the two groups.
    odds = math.comb(a.n + b.n, a.n) / 2
    return (
        f"Each of the {a.n} runs of {faster.kind.label} was faster than each of the {b.n} of {slower.kind.label} "
        f"({a.low / b.high:.2f} to {a.high / b.low:.2f} times, run against run). Were the two equally fast, "
        f"so clean a split would come by chance once in {odds:.0f} times."
    )


def _gain_over_single(groups: Sequence[Group], faster: Group) -> str:
    single = next((group for group in groups if group.kind.mode == "single"), None)
    if not single or single is faster:
        return ""
    ratio = _speed(faster).median / _speed(single).median
    one = format_figure("samples_per_s", _speed(single).median)
    if ratio <= 1:
        return f"No gain over one worker: single did {one} samples/s."
    efficiency = format_cell(faster, "scaling_efficiency")[0]
    return (
        f"{faster.kind.label} was {ratio:.2f} times as fast as one worker (single, {one} samples/s): "
        f"a scaling efficiency of {efficiency}."
    )


def _times_to_target(groups: Sequence[Group], faster: Group, target: float | None) -> str:
    if not target:
        return ""
    if not any(group["time_to_target_s"] for group in groups):
        return f"No run reached the target accuracy of {target:g}."
    # Only the groups that the headline is about, and the baseline: the summary has all.
    near = [group for group in groups if group.kind.workers == faster.kind.workers or group.kind.mode == "single"]
    reached = sorted((time.median, _with_label(g, "time_to_target_s")) for g in near if (time := g["time_to_target_s"]))
    never = [group.kind.label for group in near if not group["time_to_target_s"]]
    times = [", ".join(text for _, text in reached)] if reached else []
    times += [f"never by {', '.join(never)}"] if never else []
    return f"Training time until {target:g} validation accuracy: {'; '.join(times)}."


def _final_accuracies(groups: Sequence[Group], images: int | None) -> str:
    measured = sorted((spread.median, group.kind.label) for group in groups if (spread := group["val_accuracy"]))
    if len(measured) < 2 or not images:
        return ""
    (low, lowest), (high, highest) = measured[0], measured[-1]
    # Two standard errors of a difference of two proportions. With Agresti and Coull's centre, it is above 0 even where
    # all accuracies are 1.
    centre = (fmean(value for value, _ in measured) * images + 2) / (images + 4)
    noise = 2 * math.sqrt(2 * centre * (1 - centre) / images)
    bounds = (
        f"from {format_figure('val_accuracy', low)} ({lowest}) to {format_figure('val_accuracy', high)} ({highest})"
    )
    expected = f"on {images:,} images two equally good models differ by up to {noise:.3f} (two standard errors)"
    if high - low <= noise:
        return f"Final validation accuracy is the same within noise: {bounds}; {expected}."
    return f"Final validation accuracy differs: {bounds}; {expected}, which is less."
