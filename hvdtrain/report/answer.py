"""The answer: one word, why, what could turn it, and what to do next, from the finished runs of a comparison.

`race.py` has what the speeds say; README.md beside this file says what it all means.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hvdtrain import modes
from hvdtrain.config.run_config import DEFAULT_EPOCHS
from hvdtrain.report import figures, following, quality, race, rule
from hvdtrain.report.contenders import DEFAULT, Field, Margins, Sides, mean_time_s, sides, timed, whole
from hvdtrain.report.doubts import Case, doubts
from hvdtrain.report.quality import NOT_SHOWN, WORSE, Quality, trained
from hvdtrain.report.race import EITHER, ONE_MACHINE, RING, SERVERS, UNKNOWN, Outcome, Race
from hvdtrain.report.rule import LOOKS
from hvdtrain.report.target import ratio_of_times
from hvdtrain.runs.read import Kind, Run

__all__ = ["EITHER", "LOOKS", "ONE_MACHINE", "RING", "SERVERS", "UNKNOWN", "Answer", "reach_answer"]
FAR_BELOW = 0.05  # the target: accuracies of runs that were too short to have one


@dataclass(frozen=True)
class Answer:
    """What a comparison says.

    Attributes:
        word: RING, SERVERS, EITHER, ONE_MACHINE or UNKNOWN.
        because: the figures that decide, in a sentence that can stand alone.
        but: at most two things that could turn it.
        next: one command.
        data: verdict.json.
    """

    word: str
    because: str
    but: list[str]
    next: str
    data: dict[str, Any]


def reach_answer(runs: Sequence[Run], margins: Margins = DEFAULT) -> Answer:
    """What the finished runs of one comparison say.

    A kind that is shown to learn less than its opponent gives way to the next of its side; where there is none, speed
    is no answer.
    """
    field = Field.of(runs)
    dropped: list[Kind] = []
    while True:
        of = sides(field, dropped)
        found = race.run(field, of, margins.speed)
        tested = _test(field, found, margins)
        worse = next((kind for kind, own in tested.items() if own.state == WORSE), None)
        if worse is None or len(of.rings if worse in of.rings else of.servers) < 2:
            break
        dropped.append(worse)
    found = replace(found, word=_with_quality(field, found, tested))
    case = Case(field, of, found, tested, dropped, margins)
    following_ = _next(case)
    because = _because(case) + following_.tells
    return Answer(found.word, because, doubts(case), following_.command, _data(case, because, following_))


def _test(field: Field, found: Outcome, margins: Margins) -> dict[Kind, Quality]:
    """How those that the word speaks for stand to their opponents, where they differ in more than speed."""
    if found.word not in (RING, SERVERS, EITHER) or not found.pair:
        return {}
    one, other = found.pair
    pairs = [(one, other), (other, one)] if found.word == EITHER else [(one, other)]
    return {a: quality.compare(field, a, b, margins.accuracy) for a, b in pairs}


def _with_quality(field: Field, found: Outcome, tested: dict[Kind, Quality]) -> str:
    """The word, unless what is faster is not shown to learn as much. Where it missed the target that its opponent
    reached, that one is the answer.
    """
    if all(own.state not in (WORSE, NOT_SHOWN) for own in tested.values()) or not found.pair:
        return found.word
    worse = next((kind for kind, own in tested.items() if own.state == WORSE), None)
    if worse:
        other = next(kind for kind in found.pair if kind != worse)
        own, target = (figures.mean(trained(field, kind), figures.accuracy) or 0.0 for kind in (worse, other))
        aim = _target(field) or 1.0
        if own < aim - FAR_BELOW and target >= aim and other.family != worse.family:
            return race.OF_FAMILY.get(other.family, UNKNOWN)
    return UNKNOWN


def _target(field: Field) -> float | None:
    runs = (run for members in field.by_kind.values() for run in whole(members))
    return next((run.summary.target_accuracy for run in runs if run.summary.target_accuracy), None)


# Why


def _because(case: Case) -> str:
    """The figures that decide."""
    found, field = case.found, case.field
    lacking = next(((k, own) for k, own in case.tested.items() if own.state in (WORSE, NOT_SHOWN)), None)
    if not found.pair:
        listed = [f"{kind.label} did {_speed(field, kind)} samples/s" for kind in field.by_kind]
        return f"{', '.join(listed)}, and there is nothing to compare that with"
    shown = found.open[0] if found.open else (found.gate if found.word == ONE_MACHINE or not found.main else found.main)
    assert shown
    text = _lead(case, shown.turned)
    if found.word == ONE_MACHINE and shown.lead.mean > 0:
        text += f": distribution that is not {case.margins.speed:.0%} faster does not pay"
    if found.word == EITHER:
        text += f": a lead too small to matter beside a margin of {case.margins.speed:.0%}"
    if found.word in (RING, SERVERS, EITHER) and found.main and found.gate:
        text += f", and {figures.times(figures.ratio(found.gate.lead)[0])} times those of {found.gate.other.label}"
    if lacking:
        return f"{text}, but {_lacking(case, *lacking)}"
    if case.tested:
        text += f"; {_as_good(case)}"
    return text


def _lead(case: Case, shown: Race) -> str:
    """`allreduce ×2 did 1.28 times the samples/s of ps-sync ×2+1, the best of 4 servers (1.19 to 1.37, 10 repeats)`."""
    one, other = (_best(case, shown, kind) for kind in (shown.one, shown.other))
    comma = "," if "," in one else ""
    times = figures.times(figures.ratio(shown.lead)[0])
    return f"{one}{comma} did {times} times the samples/s of {other} ({figures.interval(shown)})"


def _best(case: Case, shown: Race, kind: Kind) -> str:
    group = next((own for own in case.of[:3] if kind in own), [kind])
    words = {modes.RING: "rings", modes.SERVERS: "servers", modes.ONE_MACHINE: "machines"}
    gate = case.found.gate
    if gate and shown in (gate, gate.turned) and kind.is_distributed and len(case.of.distributed) > 1:
        return f"{kind.label}, the best that is distributed"
    is_among = len(group) > 1 and case.of.rings and case.of.servers
    return f"{kind.label}, the best of {len(group)} {words[kind.family]}" if is_among else kind.label


def _speed(field: Field, kind: Kind) -> str:
    return f"{figures.mean(timed(field.by_kind[kind]), figures.speed) or 0:,.0f}"


def _accuracies(case: Case, kind: Kind) -> str:
    assert case.found.pair
    other = next(k for k in case.found.pair if k != kind)
    own = (figures.mean(trained(case.field, k), figures.accuracy) for k in (kind, other))
    return " beside ".join("none" if value is None else f"{value:.3f}" for value in own)


def _as_good(case: Case) -> str:
    kind, found = next(iter(case.tested.items()))
    return found.state if found.state == quality.SAME else f"as accurate, {_accuracies(case, kind)}"


def _lacking(case: Case, kind: Kind, found: Quality) -> str:
    is_not = "is not" if found.state == WORSE else "is not shown to be"
    if not found.difference:
        return f"what {kind.label} learns beside that was not measured"
    points = f"{100 * case.margins.accuracy:.3g} points"
    return f"the accuracy of {kind.label}, {_accuracies(case, kind)}, {is_not} within {points}"


# What next


class Next(NamedTuple):
    """A command, about how many seconds it takes, and what it is for, to end `because` with."""

    command: str
    seconds: float | None
    tells: str = ""
    repeats: int | None = None


def _next(case: Case) -> Next:
    runs = [run for kind, members in case.field.by_kind.items() if kind.family for run in members]
    runs = runs or [run for members in case.field.by_kind.values() for run in members]
    repeats = max(run.repeat for run in runs)
    missing = _missing(case.of)
    if case.found.open:
        return _more_repeats(case, runs, repeats)
    if case.found.word == UNKNOWN and case.tested:
        return _more_training(case, runs, repeats)
    if missing:
        add = [next(name for name in modes.names() if modes.declared(name).family == family) for family in missing]
        seconds = repeats * len(add) * mean_time_s(runs)
        return Next(following.compare_command(runs, max(repeats, LOOKS[0]), add), seconds)
    if case.of.left_out:
        return _comparison(runs, repeats + LOOKS[0])
    assert case.found.pair
    return _launch(case.field.by_kind[_answering(case)])


def _missing(of: Sides) -> list[str]:
    """The families of which no run is there."""
    out = {kind.family for kind in of.left_out}
    groups = {modes.ONE_MACHINE: of.machines, modes.RING: of.rings, modes.SERVERS: of.servers}
    wanted = [family for family, own in groups.items() if not own and family not in out]
    alone = len(of.distributed) < 2
    return [family for family in wanted if family == modes.ONE_MACHINE or alone]


def _comparison(runs: Sequence[Run], repeats: int, tells: str = "", **more: Any) -> Next:
    """The same comparison with so many repeats."""
    kinds = {run.kind for run in runs}
    seconds = max(0, repeats * len(kinds) - len(timed(runs))) * mean_time_s(runs)
    return Next(following.compare_command(runs, repeats, **more), seconds, tells, repeats)


def _more_repeats(case: Case, runs: Sequence[Run], repeats: int) -> Next:
    races, margin = case.found.open, case.margins.speed
    each = [rule.repeats_needed(own.lead, margin, own.size, own is case.found.gate) for own in races]
    needed = None if None in each else max(filter(None, each))
    done = min(own.lead.n for own in races)
    lost = repeats - done  # repeats that only one side has, or that ran at another time
    words = f"{needed} or more" if done < 2 else f"about {needed}" if needed else f"not even {LOOKS[-1]}"
    tells = f": {words} repeats would tell" + ("" if needed else ", longer runs may")
    add = [] if case.of.machines else [n for n in modes.names() if modes.declared(n).family == modes.ONE_MACHINE]
    if needed:
        return _comparison(runs, needed + lost, tells, add=add)
    return _comparison(runs, LOOKS[0], tells, add=add, is_longer=True)


def _more_training(case: Case, runs: Sequence[Run], repeats: int) -> Next:
    """Where accuracies are far below the target, longer trainings tell, and more of them do not."""
    assert case.found.pair
    target = _target(case.field) or 0.0
    best = max(figures.mean(trained(case.field, k), figures.accuracy) or 0.0 for k in case.found.pair)
    trainings = whole(runs)
    if trainings and best < target - FAR_BELOW:
        seconds = following.LONGER * LOOKS[0] * len({run.kind for run in runs}) * mean_time_s(trainings)
        command = following.compare_command(runs, max(repeats, LOOKS[0]), is_longer=True)
        return Next(command, seconds, f": trained too briefly for {target:g}")
    done = max((run.repeat for run in trainings), default=0)
    more = next((look for look in LOOKS if look > done), LOOKS[-1])
    if len(trainings) == len(runs):
        return _comparison(runs, more, f": about {more} repeats would tell")
    kinds = len({run.kind for run in trainings}) or 2
    seconds = (more - done) * kinds * mean_time_s(trainings or runs)
    command = following.compare_command(runs, repeats, trainings=more)
    return Next(command, seconds, f": about {more} trainings would tell")


def _answering(case: Case) -> Kind:
    """The kind that the word stands for; of EITHER the faster."""
    assert case.found.pair
    families = {RING: modes.RING, SERVERS: modes.SERVERS, ONE_MACHINE: modes.ONE_MACHINE}
    wanted = families.get(case.found.word)
    return next((kind for kind in case.found.pair if kind.family == wanted), case.found.pair[0])


def _launch(runs: Sequence[Run]) -> Next:
    run = (whole(runs) or list(runs))[0]
    took = [own.summary.wall_s for own in whole(runs) if own.summary.wall_s]
    samples, speed = run.manifest.train_samples, run.summary.samples_per_s
    guess = DEFAULT_EPOCHS * samples / speed if samples and speed else None
    return Next(following.launch_line(run), sum(took) / len(took) if took else guess)


# verdict.json


def _data(case: Case, because: str, following_: Next) -> dict[str, Any]:
    found, field = case.found, case.field
    beside = figures.reference(field, case.of)
    pair = found.pair
    tested = [
        {"run": kind.label, "state": own.state, "paired_by": own.by, **_difference(own)}
        for kind, own in case.tested.items()
    ]
    return {
        "answer": found.word, "because": because, "but": doubts(case), "next": following_.command,
        "next_s": following_.seconds, "margin": case.margins.speed, "accuracy_margin": case.margins.accuracy,
        "speed": figures.race_data(found.main), "one_machine": figures.race_data(found.gate),
        "repeats_needed": following_.repeats, "quality": tested, "target": _target(field),
        "time_to_target": ratio_of_times(field.by_kind[pair[0]], field.by_kind[pair[1]]) if pair else None,
        "beside": "ring" if beside.family == modes.RING else beside.label,
        "runs": figures.rows(field, beside),
        "left_out": [kind.label for kind in (*case.of.left_out, *case.dropped)],
    }  # fmt: skip


def _difference(own: Quality) -> dict[str, Any]:
    if not own.difference:
        return {"difference": None, "ci_low": None, "ci_high": None, "n": 0}
    mean, low, high = (float(x) for x in own.difference[:3])
    ends = {"ci_low": low, "ci_high": high} if own.difference.n > 1 else {"ci_low": None, "ci_high": None}
    return {"difference": mean, **ends, "n": own.difference.n}
