"""Why an answer is what it is: `because`, the deciding figures in a sentence."""

from statistics import fmean
from typing import Any

from hvdtrain.base import modes
from hvdtrain.base.formatting import with_noun
from hvdtrain.reporting import figures
from hvdtrain.reporting.columns import busy_cores_share, format_figure
from hvdtrain.reporting.doubts import Evidence
from hvdtrain.reporting.figures import format_ratio
from hvdtrain.reporting.measures import SPEED, speed_runs
from hvdtrain.reporting.quality import NOT_SHOWN, SAME, UNTOLD, WORSE, is_by_loss, trained
from hvdtrain.reporting.race import EITHER, ONE_MACHINE_WINS, RING_WINS, SERVERS_WIN, UNKNOWN, Race
from hvdtrain.reporting.target import Target
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import Kind

_NAME_OF_FAMILY = {
    modes.RING: "rings",
    modes.SERVERS: "contenders with servers",
    modes.ONE_MACHINE: "ways to use one machine",
}


def because(evidence: Evidence) -> str:
    """Returns the deciding figures in a sentence: of speed and quality, or of times to the target."""
    if not evidence.verdict.pair:
        labels = ", ".join(kind.label for kind in evidence.contenders.by_kind)
        return f"there is nothing to compare {labels} with"
    text = _race_words(evidence)
    in_doubt = _quality_in_doubt(evidence)
    if in_doubt:
        return text + in_doubt
    return text + _share_of_bound(evidence) + _quality_words(evidence)


# Who leads


def _race_words(evidence: Evidence) -> str:
    """Returns who leads, by how much, and why that is enough or not."""
    verdict = evidence.verdict
    margin = evidence.margins.speed
    race = verdict.undecided[0] if verdict.undecided else verdict.deciding_race
    assert race
    text = _lean_words(evidence) + _lead_words(evidence, race.faster_first)
    if verdict.explained_by_sharing:
        text += ": no more than is explained by hosts that share the cores of one machine"
    if verdict.word == ONE_MACHINE_WINS and race.lead.mean > 0:
        text += f": distribution that is not {margin:.0%} faster does not pay"
    if verdict.word == EITHER:
        text += f": a lead too small to matter beside a margin of {margin:.0%}"
    over_machine = verdict.over_machine
    if verdict.word in (RING_WINS, SERVERS_WIN, EITHER) and verdict.main and over_machine:
        ratio = format_ratio(figures.mean_ratio(over_machine.lead))
        machine = over_machine.other.label
        those = f"those of {machine}" if _by_speed(evidence) else f"as fast as {machine}"
        text += f", and {ratio} times {those}"
    return text


def _by_speed(evidence: Evidence) -> bool:
    return evidence.contenders.measure is SPEED


def lean(evidence: Evidence) -> dict[str, Any] | None:
    """Returns who is ahead in the mean if the speeds do not decide, for verdict.json.

    Returns:
        `to`, the family, or the kind if both are of one family, and `ratio`; None if something is
        decided or nothing is known.
    """
    verdict = evidence.verdict
    if not verdict.undecided or verdict.explained_by_sharing:
        return None
    race = verdict.undecided[0].faster_first
    if not race.lead.n:
        return None
    is_one_family = race.one.family == race.other.family
    return {
        "to": race.one.label if is_one_family else race.one.family,
        "ratio": figures.mean_ratio(race.lead),
    }


def _lean_words(evidence: Evidence) -> str:
    """Returns `ring ahead, 1.20 times; not sure: `; empty if something is decided."""
    leans = lean(evidence)
    if not leans:
        return ""
    return f"{leans['to']} ahead, {format_ratio(leans['ratio'])} times; not sure: "


def _lead_words(evidence: Evidence, race: Race) -> str:
    """Returns the lead of a race, with the faster contender first.

    For instance `allreduce ×2 did 1.19 to 1.37 times the samples/s of ps-sync ×2+1, the best of 4
    servers (mean 1.28, 5 repeats)`. The interval stands before the mean: the best of several is
    estimated too high, more so on the side that has more contenders, and the interval allows for
    that.
    """
    one = _label_as_best(evidence, race, race.one)
    other = _label_as_best(evidence, race, race.other)
    if not _by_speed(evidence):
        return _lead_in_time(evidence, race, one, other)
    times, detail = _ratio_words(race)
    return f"{_closed(one)} did {times} times the samples/s of {other} ({detail})"


def _ratio_words(race: Race) -> tuple[str, str]:
    """Returns the ratio of a race, `1.19 to 1.37`, and `mean 1.28, 5 repeats`."""
    mean = format_ratio(figures.mean_ratio(race.lead))
    repeats = with_noun(race.lead.n, "repeat")
    low, high = figures.ratio_interval(race.lead)
    if race.lead.n <= 2 or (low is None and high is None):
        return mean, repeats
    if high is None and low is not None:
        return f"at least {format_ratio(low)}", f"mean at least {mean}, {repeats}"
    if low is None and high is not None:
        return f"at most {format_ratio(high)}", f"mean at most {mean}, {repeats}"
    assert low is not None and high is not None
    return f"{format_ratio(low)} to {format_ratio(high)}", f"mean {mean}, {repeats}"


# The time to the target


def _lead_in_time(evidence: Evidence, race: Race, one: str, other: str) -> str:
    """Returns the lead of a race by the time to the target.

    For instance `allreduce ×2 took 5.21 s to 0.9 (5 of 5 trainings reached it), ps-sync ×2+1 6.60 s
    (5 of 5): 1.19 to 1.37 times as fast (mean 1.28, 5 repeats)`.

    Args:
        evidence: what is known.
        race: the race, with the faster contender first.
        one, other: the contenders' labels.
    """
    target = figures.target(evidence.contenders) or Target(0)
    own_seconds, own_reached = _time_words(evidence, race.one)
    seconds, reached = _time_words(evidence, race.other)
    took = (
        f"{_closed(one)} took {own_seconds} to {target.words} ({own_reached} trainings reached it), "
        f"{_closed(other)} {seconds} ({reached})"
    )
    if not race.lead.n:
        return f"{took}: there is no pair of trainings of which one reached it"
    times, detail = _ratio_words(race)
    return f"{took}: {times} times as fast ({detail})"


def _closed(label: str) -> str:
    """Returns a label that has a comma with one behind it."""
    return f"{label}," if "," in label else label


def _time_words(evidence: Evidence, kind: Kind) -> tuple[str, str]:
    """Returns `5.21 s` and `5 of 5`: a kind's time to the target, and who reached it."""
    reaches = figures.reaches(evidence.contenders.by_kind[kind])
    reached = sum(reach.is_reached for reach in reaches)
    mean = figures.time_to_target(evidence.contenders.by_kind[kind])["mean"]
    seconds = "an unknown time" if mean is None else format_figure("time_to_target_s", mean)
    over = "over " if reached < len(reaches) else ""
    return f"{over}{seconds}", f"{reached} of {len(reaches)}"


def _label_as_best(evidence: Evidence, race: Race, kind: Kind) -> str:
    """Returns a kind's label with how many it is the best of, if there are several."""
    sides = evidence.sides
    over_machine = evidence.verdict.over_machine
    is_over_machine = over_machine and race in (over_machine, over_machine.faster_first)
    if is_over_machine and kind.is_distributed and len(sides.distributed) > 1:
        return f"{kind.label}, the fastest distributed contender"
    groups = (sides.rings, sides.servers, sides.machines)
    group = next((group for group in groups if kind in group), [kind])
    if len(group) > 1 and sides.rings and sides.servers:
        return f"{kind.label}, the best of {len(group)} {_NAME_OF_FAMILY[kind.family]}"
    return kind.label


def _share_of_bound(evidence: Evidence) -> str:
    """Returns how much of what its links or cores allow the winner reached; empty if not known.

    A winner at a third of its bound leaves open what a better one would do.
    """
    verdict = evidence.verdict
    if verdict.word in (UNKNOWN, EITHER) or not verdict.pair or not _by_speed(evidence):
        return ""
    winner, _ = verdict.pair
    runs = speed_runs(evidence.contenders.by_kind[winner])
    bound = network_bound(runs[0])
    if bound:
        speeds = [run.summary.samples_per_s for run in runs]
        return f"; the winner reached {fmean(filter(None, speeds)) / bound:.0%} of what its links carry"
    if runs[0].on_gpu:
        return ""
    busy = figures.mean(runs, busy_cores_share)
    return f"; the winner kept {min(busy, 1.0):.0%} of its hosts' cores busy" if busy else ""


# Quality


def _quality_in_doubt(evidence: Evidence) -> str:
    """Returns whose accuracy is not shown to be as good; empty if all is shown."""
    for kind, result in evidence.qualities.items():
        if result.state not in (WORSE, NOT_SHOWN):
            continue
        if not result.difference:
            return f", but what {kind.label} learns beside that was not measured"
        is_not = "is not" if result.state == WORSE else "is not shown to be"
        margin = f"{100 * evidence.margins.accuracy:.3g}"
        if _is_by_loss(evidence, kind):
            return f", but the loss of {kind.label} {is_not} within {margin} % of its opponent's"
        accuracies = _accuracies(evidence, kind)
        return f", but the accuracy of {kind.label}, {accuracies}, {is_not} within {margin} points"
    return ""


def _is_by_loss(evidence: Evidence, kind: Kind) -> bool:
    """Returns whether the kind's trainings are of a script that reports a loss alone."""
    return any(is_by_loss(run) for run in trained(evidence.contenders, kind))


def _quality_words(evidence: Evidence) -> str:
    """Returns that the first kind that was tested learns as much; empty if none was tested."""
    if not evidence.qualities:
        return ""
    kind, result = next(iter(evidence.qualities.items()))
    if result.state == SAME:
        return f"; {SAME}"
    if result.state == UNTOLD:
        return (
            "; by speed alone: what was learned is not told: --trainings 2 trains the script as a "
            "whole, and its job.report says"
        )
    if _is_by_loss(evidence, kind):
        return "; with as low a loss"
    return f"; as accurate, {_accuracies(evidence, kind)}"


def _accuracies(evidence: Evidence, first: Kind) -> str:
    """Returns the mean accuracies of both opponents: `0.961 beside 0.967`."""
    kinds = sorted((kind for kind, _ in evidence.opponents), key=lambda kind: kind != first)
    accuracies = []
    for kind in kinds:
        accuracy = figures.mean(trained(evidence.contenders, kind), figures.accuracy)
        accuracies.append("none" if accuracy is None else f"{accuracy:.3f}")
    return " beside ".join(accuracies)
