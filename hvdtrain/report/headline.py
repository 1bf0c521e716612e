"""The verdict in words, and as verdict.json: the words say nothing that the file does not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import geometric_mean
from typing import Any

from hvdtrain.report import verdict as v
from hvdtrain.report.caveats import caveats
from hvdtrain.report.columns import format_figure
from hvdtrain.report.paired import CONFIDENCE, LEAST_REPEATS, MOST_REPEATS, Estimate
from hvdtrain.runs.read import Kind, Run, finished_by_kind

RING, SERVERS = "ring all-reduce", "the parameter server"
_BASES = {
    "workers": "on equally many workers",
    "processes": "on equally many processes, servers included",
    "processor-seconds": "by processor time of all processes",
}
Qualities = dict[Kind, v.Quality]
Effects = dict[Kind, Estimate]
Times = dict[str, Estimate]


@dataclass(frozen=True)
class Verdict:
    """A headline, its caveats, the sentences that support it, and the content of verdict.json."""

    headline: str
    caveats: list[str]
    sentences: list[str]
    data: dict[str, Any]


def reach_verdict(runs: Sequence[Run], margins: v.Margins = v.DEFAULT) -> Verdict:
    """Ring all-reduce or a parameter server, as far as the finished runs of a comparison show it."""
    by_kind = finished_by_kind(runs)
    answers = v.reach_answers(by_kind, margins)
    images, target = runs[0].manifest.validation_samples, runs[0].summary.target_accuracy
    reference, effects, times = None, Effects(), Times()
    if answers:
        first = answers[0]
        best, qualities = first.best, first.qualities
        reference, effects = v.effects(by_kind, first)
        times = v.times_to_target(by_kind[first.faster], by_kind[first.slower])
        headline = _headline(answers, margins) + _faster_still(first, effects)
        data = {"outcome": first.outcome, "headline": headline, **_answer_data(first)}
        sentences = [] if _disagree(answers) else [_sentence(_on_basis(a, margins)) for a in answers[1:]]
        sentences += [_effects(reference, effects), _accuracies(best, qualities, margins, images)]
        sentences += [_times(first, times, target, by_kind), _elsewhere(first, by_kind)]
    else:
        best, qualities = v.compare_accuracy(by_kind, margins.accuracy)
        headline = _nothing(by_kind)
        empty = ("winner", "loser", "basis", "faster", "slower", "ratio", "ci_low", "ci_high", "confidence")
        data = {"outcome": v.NOTHING, "headline": headline, **dict.fromkeys(empty), "n": 0, "repeats_needed": None}
        sentences = [_what_to_add(by_kind)]
    others = {answer.basis: _answer_data(answer) for answer in answers[1:]}
    data |= {
        "margin": margins.speed,
        "quality": _quality_data(best, qualities, margins, images),
        "equal_processes": others.get("processes"),
        "equal_processor_seconds": others.get("processor-seconds"),
        "effects": {
            "beside": reference and reference.label,
            "runs": [{"run": kind.label, **_ratio_data(found)} for kind, found in effects.items()],
        },
        "time_to_target": _times_data(times, target, by_kind),
        "caveats": caveats(runs),
    }
    return Verdict(headline, data["caveats"], [sentence for sentence in sentences if sentence], data)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _nothing(by_kind: v.ByKind) -> str:
    speeds = [
        f"{format_figure('samples_per_s', geometric_mean(found))} samples/s with {kind.label}"
        for kind, runs in by_kind.items()
        if (found := [speed for run in runs if (speed := v.speed(run))])
    ]
    return f"Nothing to compare yet on equal terms: {', '.join(speeds) or 'no speed was measured'}."


def _what_to_add(by_kind: v.ByKind) -> str:
    kinds = [kind for kind in by_kind if kind.mode != "single"]
    if any(a.workers == b.workers and v.ran_alike(by_kind[a], by_kind[b]) for a, b in combinations(kinds, 2)):
        return "Runs are compared with those of the same --repeat, and these modes have no repeat in common: add them."
    return "Add runs of another mode on as many workers, started alike on the same hosts."


def _headline(answers: Sequence[v.Answer], margins: v.Margins) -> str:
    """One sentence; where the bases disagree, one for each, which names its basis."""
    if _disagree(answers):
        return " ".join(_sentence(_on_basis(answer, margins)) for answer in answers)
    first = answers[0]
    return _sentence(_said(first, margins) if first.basis == "workers" else _on_basis(first, margins))


def _disagree(answers: Sequence[v.Answer]) -> bool:
    return len({answer.winner and _side(answer.winner) for answer in answers}) > 1


def _side(kind: Kind) -> str:
    """Horovod's ring and the servers are what this is about; DDP, another ring, is named as itself."""
    return RING if kind.mode == "allreduce" else SERVERS if kind.servers else kind.label


def _on_basis(answer: v.Answer, margins: v.Margins) -> str:
    return f"{_BASES[answer.basis]}, {_said(answer, margins)}"


def _said(answer: v.Answer, margins: v.Margins) -> str:
    faster, slower, n = answer.faster, answer.slower, answer.lead.n
    what = "samples per processor-second" if answer.basis == "processor-seconds" else "samples/s"
    times, interval = _times_with_interval(answer.lead, answer.confidence)
    lead = f"{faster.label} did {times} the {what} of {slower.label} ({interval}n = {n})"
    if answer.winner:
        are_opposite = {_side(faster), _side(slower)} == {RING, SERVERS}
        return f"{_side(faster)} was faster: {lead}" if are_opposite else f"there is a winner: {lead}"
    but = _lacking_quality(answer, margins)
    if answer.outcome == v.NO_WINNER:
        is_worse = answer.qualities[faster].state == v.WORSE
        return f"nobody won: {lead}{but}" if is_worse else f"neither is faster by {100 * margins.speed:.3g} %: {lead}"
    needed = f"{answer.repeats_needed or MOST_REPEATS:,}"
    more = f"{LEAST_REPEATS} or more" if n < 2 else f"about {needed}" if answer.repeats_needed else f"not even {needed}"
    repeats = "" if answer.qualities[faster].accuracy is None else f"; {more} repeats in all would tell"
    return f"it is not yet known who wins: {lead}{but}{repeats}"


def _lacking_quality(answer: v.Answer, margins: v.Margins) -> str:
    quality = answer.qualities[answer.faster]
    difference = quality.difference
    is_close = difference is not None and difference.mean > -margins.accuracy
    if quality.state == v.AS_GOOD or (is_close and answer.lead.n < LEAST_REPEATS):  # too early to say more
        return ""
    if answer.best is None or quality.accuracy is None:
        return ", but its validation accuracy was not measured"
    own, best = (format_figure("val_accuracy", answer.qualities[k].accuracy) for k in (answer.faster, answer.best))
    is_not = "is not" if quality.state == v.WORSE else "is not shown to be"
    of_best = f"of the best: {own} beside {best} of {answer.best.label}"
    return f", but its validation accuracy {is_not} within {_points(margins.accuracy)} {of_best}"


def _points(share: float) -> str:
    return "1 point" if share == 0.01 else f"{100 * share:.3g} points"


def _faster_still(answer: v.Answer, effects: Effects) -> str:
    """The kinds that did more than the two compared: DDP, the baseline, servers that learn less."""
    most = max(0.0, *(effects[kind].mean for kind in (answer.faster, answer.slower) if kind in effects))
    listed = [
        kind.label + (" (less accurate)" if answer.qualities[kind].state == v.WORSE else "")
        for kind, found in effects.items()
        if found.mean > most
    ]
    return f" {' and '.join(listed)} did more samples/s than both." if listed else ""


def _times_with_interval(logs: Estimate, confidence: float = CONFIDENCE) -> tuple[str, str]:
    """`1.31 times` and `95 % interval 1.20 to 1.43, `; no interval from one repeat."""
    ratio, interval = _with_interval(logs)
    return f"{ratio} times", f"{100 * confidence:.3g} % interval {interval}, " if interval else ""


def _with_interval(logs: Estimate) -> tuple[str, str]:
    ratio, *interval = (f"{x:.2f}" if 0.1 <= x < 1000 else f"{x:.2g}" for x in v.ratio(logs) if x is not None)
    return ratio, " to ".join(interval)


def _effects(reference: Kind, effects: Effects) -> str:
    listed = []
    for kind, found in effects.items():
        ratio, interval = _with_interval(found)
        listed.append(f"{kind.label} {ratio}" + (f" ({interval})" if interval else ""))
    with_intervals = _with_intervals(found.n for found in effects.values())
    return f"Samples/s where {reference.label} is 1{with_intervals}: {', '.join(listed)}."


def _with_intervals(repeats: Iterable[int]) -> str:
    return f", with {100 * CONFIDENCE:.3g} % intervals" if max(repeats, default=0) > 1 else ""


def _accuracies(best: Kind | None, qualities: Qualities, margins: v.Margins, images: int | None) -> str:
    listed = []
    for kind, quality in qualities.items():
        if kind != best and quality.difference:
            mean, low, high = (f"{100 * x:+.1f}" for x in quality.difference[:3])
            interval = f" ({low} to {high})" if quality.difference.n > 1 and low != high else ""
            listed.append(f"{kind.label} {mean}{interval}, {quality.state}")
    if not best or not listed:
        return ""
    own = f"{format_figure('val_accuracy', qualities[best].accuracy)}" + (f" on {images:,} images" if images else "")
    with_intervals = _with_intervals(quality.difference.n for quality in qualities.values() if quality.difference)
    return (
        f"Validation accuracy in points beside {best.label} ({own}), paired by seed{with_intervals}: "
        f"{'; '.join(listed)}. As good means within {_points(margins.accuracy)}."
    )


def _times(answer: v.Answer, times: Times, target: float | None, by_kind: v.ByKind) -> str:
    if not target:
        return ""
    if not times:
        sides = [(kind.label, [run.summary.time_to_target_s for run in by_kind[kind]]) for kind in answer.pair]
        reached = [f"{len(list(filter(None, found)))} of {len(found)} runs of {label}" for label, found in sides]
        return f"{target:g} validation accuracy was reached by {' and '.join(reached)}."
    total, each, samples = (_times_with_interval(times[name]) for name in ("seconds", "seconds_per_sample", "samples"))
    return (
        f"To {target:g} validation accuracy, {answer.faster.label} took {total[0]} as long as {answer.slower.label} "
        f"({total[1]}n = {times['seconds'].n}): {each[0]} the seconds a sample, {samples[0]} the samples."
    )


def _elsewhere(answer: v.Answer, by_kind: v.ByKind) -> str:
    faster = by_kind[answer.faster]
    others = [k.label for k, runs in by_kind.items() if k.mode != "single" and not v.ran_alike(runs, faster)]
    why = "as they ran on other hosts or were started in another way"
    return f"Not compared, {why}: {', '.join(others)}." if others else ""


def _ratio_data(logs: Estimate) -> dict[str, Any]:
    ratio, low, high = v.ratio(logs)
    return {"ratio": ratio, "ci_low": low, "ci_high": high, "n": logs.n}


def _answer_data(answer: v.Answer) -> dict[str, Any]:
    faster, slower = (kind.label for kind in answer.pair)
    won = answer.winner is not None
    return {
        "winner": faster if won else None, "loser": slower if won else None, "basis": answer.basis,
        "faster": faster, "slower": slower, **_ratio_data(answer.lead), "confidence": answer.confidence,
        "repeats_needed": answer.repeats_needed,
    }  # fmt: skip


def _quality_data(best: Kind | None, qualities: Qualities, margins: v.Margins, images: int | None) -> dict[str, Any]:
    listed = []
    for kind, (accuracy, found, state) in qualities.items():
        mean, low, high = map(float, found[:3]) if found else (None, None, None)
        interval = {"ci_low": low, "ci_high": high} if found and found.n > 1 else {"ci_low": None, "ci_high": None}
        row = {"run": kind.label, "accuracy": accuracy, "state": state, "difference": mean, **interval}
        listed.append(row | {"n": found.n if found else 0})
    about = {"margin": margins.accuracy, "paired_by": "seed", "images": images, "best": best and best.label}
    return about | {"runs": listed}


def _times_data(times: Times, target: float | None, by_kind: v.ByKind) -> dict[str, Any]:
    runs = [
        {
            "run": kind.label,
            "seconds": [run.summary.time_to_target_s for run in members],
            "samples": [v.samples_to_target(run) for run in members],
        }
        for kind, members in by_kind.items()
    ]
    return {"target": target, "ratios": {name: _ratio_data(found) for name, found in times.items()}, "runs": runs}
