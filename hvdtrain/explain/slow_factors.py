"""What a slow worker costs each mode: runs that differ in --slow, against how slow it was, with theory beside them."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING

from hvdtrain import modes, plot_style
from hvdtrain.errors import UsageError
from hvdtrain.explain.account import account
from hvdtrain.explain.timeline import read_timeline
from hvdtrain.numerics.slowdown import Rule, factor_of_all, parse, slowed_workers
from hvdtrain.report.page import Plot
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Kind, Run, finished_by_kind
from hvdtrain.runs.schema import each_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAPTION = (
    "Against how many times as long one worker computed, in the runs where one did all the time; dots are repeats, "
    "lines go through geometric means. Dashed is theory, from the speed without a slow worker and the share of a step "
    "that is computing: who waits for all is as slow as the slowest, with a backup worker for each slow one nobody is; "
    "without waiting the rates of the workers add up, and a push of the slow one has missed more of the others'."
)
CAPTION_OF_ALL = "All workers computed {:g} times as long as they can, the slow one so many times longer still."
Means = dict[Kind, dict[float, list[Run]]]  # runs of each kind by the slow worker's factor


def slow_factors(runs: Sequence[Run]) -> Plot | None:
    """The plot, where finished runs had a worker that was slow by different factors; else None."""
    slowed = [
        (kind, run, *both) for kind, members in finished_by_kind(runs).items() for run in members
        if kind.mode in modes.names() and kind.workers > 1 and (both := factors_of(run))
    ]  # fmt: skip
    if not slowed:
        return None
    usual = Counter(of_all for *_, of_all in slowed).most_common(1)[0][0]
    found: Means = {}
    for kind, run, factor, of_all in slowed:
        if of_all == usual:
            found.setdefault(kind, {}).setdefault(factor, []).append(run)
    found = {kind: dict(sorted(of.items())) for kind, of in found.items() if len(of) > 1}
    if not found:
        return None
    from matplotlib import rc_context

    with rc_context(plot_style.RC):
        figure, (speed, time, stale) = plot_style.new_figure(4.0, columns=3)
        _lines(speed, found, lambda run: run.summary.samples_per_s)
        for kind, of in found.items():
            if theory := expected_speeds(kind, of, of):
                speed.plot(list(theory), list(theory.values()), "--", color=plot_style.colour(kind), linewidth=0.9)
        _lines(time, found, lambda run: run.summary.time_to_target_s)
        _staleness(stale, found)
        factors = sorted({factor for of in found.values() for factor in of})
        target = next((run.summary.target_accuracy for of in found.values() for own in of.values() for run in own), 0)
        titles = ("samples/s", f"seconds to an accuracy of {target:g}", "staleness (hollow: the others)")
        for axes, title in zip((speed, time, stale), titles, strict=True):
            axes.set(title=title, xlabel="slow worker's factor", xscale="log")
            axes.set_xticks(factors, [f"{factor:g}×" for factor in factors])
            axes.minorticks_off()
            axes.grid(True)
        plot_style.legend(figure, [speed])
    words = _wins(found, "samples/s", lambda run: run.summary.samples_per_s, more_is_better=True)
    words += _wins(found, "time to that accuracy", lambda run: run.summary.time_to_target_s, more_is_better=False)
    caption = [CAPTION] if usual == 1 else [CAPTION, CAPTION_OF_ALL.format(usual)]
    return Plot("slow", "What a slow worker costs", " ".join([*caption, *words]), figure)


def factors_of(run: Run) -> tuple[float, float] | None:
    """How many times as long as the others one worker computed all the time, 1 where none was slow, and how many times
    as long as they can all did; None of any other --slow.
    """
    try:
        of_one = [rule for rule in parse(field_value(run, "slow.asked")) if not rule.slows_all]
        of_all = factor_of_all(field_value(run, "slow.asked"))
    except UsageError:
        return None
    if not of_one:
        return 1.0, of_all
    [rule] = of_one if len(of_one) == 1 else [None]
    return (rule.factor, of_all) if rule and rule == Rule(rule.worker, rule.factor) else None


def expected_speeds(kind: Kind, of: Mapping[float, Sequence[Run]], factors: Iterable[float]) -> dict[float, float]:
    """Samples/s in theory by the slow worker's factor, from the runs without a slow worker; nothing without them.

    In lockstep, and for any finite bound of staleness, all are as slow as the slowest; asynchronous workers' rates add
    up. What of a step is not computing stays as it was, except that equal workers in lockstep wait for the one that
    happens to be the slowest in a step, and that ends where one always is.
    """
    if 1.0 not in of:
        return {}
    base = geometric_mean(run.summary.samples_per_s or 1.0 for run in of[1.0])
    computing = fmean(_computing_share(run) for run in of[1.0])
    is_lockstep = modes.declared(kind.mode).lockstep
    waiting = fmean(_share_waited_for_equals(run) for run in of[1.0]) if is_lockstep else 0.0

    def speed(factor: float) -> float:
        longer = (factor - 1) * computing  # the slow worker's own step
        if kind.mode == "ps-async":
            return base * (kind.workers - 1 + 1 / (1 + longer)) / kind.workers
        return base if of[1.0][0].manifest.backup else base / (1 + max(0.0, longer - waiting))

    return {factor: speed(factor) for factor in factors}


def _share_waited_for_equals(run: Run) -> float:
    """How much of a step of a run in lockstep without a slow worker its workers wait for the slowest of them."""
    try:
        found = account(run, read_timeline(run))
    except UsageError:  # too short to tell
        return 0.0
    return found.parts["waiting_for_slowest"] / found.step_s


def _computing_share(run: Run) -> float:
    seconds = run.summary.step_seconds
    total = sum(seconds.values())
    return (seconds.get("forward", 0.0) + seconds.get("backward", 0.0)) / total if total else 1.0


def expected_staleness(kind: Kind, slowed: float, is_slow: bool) -> float:
    """Mean staleness in pushes of an asynchronous worker, the sum of the others' rates over its own, where one has so
    much of the others' speed.
    """
    return (kind.workers - 1) / slowed if is_slow else kind.workers - 2 + slowed


Figure = Callable[[Run], float | None]


def _lines(axes: "Axes", found: Means, figure: Figure) -> None:
    for kind, of in found.items():
        points = {factor: [value for run in runs if (value := figure(run))] for factor, runs in of.items()}
        points = {factor: values for factor, values in points.items() if values}
        means = [geometric_mean(values) for values in points.values()]
        alike = sorted(other.variant for other in found if other.mode == kind.mode)
        axes.plot(
            list(points), means, color=plot_style.colour(kind), linewidth=1.4, label=kind.label,
            linestyle=("-", "-.", ":")[alike.index(kind.variant) % 3],
        )  # fmt: skip
        for factor, values in points.items():
            plot_style.dots(axes, [factor] * len(values), values, kind)
    plot_style.log_scale(axes)


def _staleness(axes: "Axes", found: Means) -> None:
    """Mean staleness of the slow worker's pushes, and of the others'."""
    for kind, of in found.items():
        if not any(run.summary.staleness_mean for runs in of.values() for run in runs):
            continue
        points = {
            factor: [both for run in runs if (both := _of_slow_and_others(run))] for factor, runs in of.items()
        }  # fmt: skip
        points = {factor: values for factor, values in points.items() if values}
        for place in (0, 1):
            means = [fmean(both[place] for both in values) for values in points.values()]
            plot_style.dots(axes, list(points), means, kind, is_hollow=bool(place))
            axes.plot(list(points), means, color=plot_style.colour(kind), linewidth=1.0)
        if kind.mode == "ps-async" and 1.0 in of:
            share = fmean(_computing_share(run) for run in of[1.0])
            pushes = kind.workers if of[1.0][0].manifest.push_scale == "softsync" else 1  # of an update
            for is_slow in (True, False):
                theory = [expected_staleness(kind, 1 / (1 + (f - 1) * share), is_slow) / pushes for f in points]
                axes.plot(list(points), theory, "--", color=plot_style.colour(kind), linewidth=0.9)


def _of_slow_and_others(run: Run) -> tuple[float, float] | None:
    """Mean staleness of the slow worker's pushes, of worker 0's where none is, and of the others'."""
    slow = f"rank{run.kind.servers + max(slowed_workers(field_value(run, 'slow.asked')), default=0)}"
    ranks, _ = run.read_steps()
    of = {
        rank: [share.staleness for share in each_share(steps) if share.staleness is not None]
        for rank, steps in ranks.items()
    }  # fmt: skip
    own, others = of.pop(slow, []), [value for values in of.values() for value in values]
    return (fmean(own), fmean(others)) if own and others else None


def _wins(found: Means, what: str, figure: Figure, more_is_better: bool) -> list[str]:
    """From which factor on each asynchronous kind is better than the best that waits for all workers, a sentence."""

    def mean(kind: Kind, factor: float) -> float | None:
        values = [value for run in found[kind].get(factor, []) if (value := figure(run))]
        return (geometric_mean(values) if more_is_better else 1 / geometric_mean(values)) if values else None

    waiting = [kind for kind in found if modes.declared(kind.mode).lockstep and not _backup(found[kind])]
    sentences = []
    for kind in (kind for kind in found if kind.mode == "ps-async"):
        leads = {}
        for factor in found[kind]:
            own, best = mean(kind, factor), max((m for other in waiting if (m := mean(other, factor))), default=None)
            if own and best:
                leads[factor] = math.log(own / best)
        if len(leads) > 1:
            sentences.append(f"{kind.label} is ahead of all that wait for every worker, in {what}, {_since(leads)}.")
    return sentences


def _backup(of: Mapping[float, Sequence[Run]]) -> bool:
    return any(run.manifest.backup for runs in of.values() for run in runs)


def _since(leads: Mapping[float, float]) -> str:
    """In words, from which factor on the logarithm of a lead is above 0: between two, on a straight line over logs."""
    if min(leads.values()) > 0:
        return f"at every factor from {min(leads):g} to {max(leads):g}"
    if leads[max(leads)] <= 0:
        return "at no factor that was tried" if max(leads.values()) <= 0 else "at some factors, and not at the largest"
    low, high = next((a, b) for a, b in reversed(list(pairwise(leads))) if leads[a] <= 0)
    share = leads[low] / (leads[low] - leads[high])
    return f"from a factor of about {math.exp(math.log(low) + share * math.log(high / low)):.1f} on"
