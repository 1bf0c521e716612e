"""The answer: one word, why, what could turn it, and what to do next, from the finished runs of a comparison.

`race.py` has what the speeds say; README.md beside this file says what it all means.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hvdtrain import modes
from hvdtrain.config.run_config import DEFAULT_EPOCHS
from hvdtrain.formatting import with_noun
from hvdtrain.report import figures, quality, race, rule
from hvdtrain.report.contenders import DEFAULT, Field, Margins, Sides, mean_time_s, sides, timed, whole
from hvdtrain.report.doubts import DOUBTS, Case
from hvdtrain.report.quality import NOT_SHOWN, WORSE, Quality, trained
from hvdtrain.report.race import EITHER, ONE_MACHINE, RING, SERVERS, UNKNOWN, Outcome, Race
from hvdtrain.report.rule import LOOKS
from hvdtrain.runs import commands
from hvdtrain.runs.read import Kind, Run

BUTS = 2
FAR_BELOW = 0.05  # the target: accuracies of runs that were too short to have one


@dataclass(frozen=True)
class Answer:
    """What a comparison says.

    Attributes:
        word: RING, SERVERS, EITHER, ONE_MACHINE or UNKNOWN.
        because: the figures that decide, in a sentence that can stand alone.
        but: at most two things that could turn it.
        next: one command.
        besides: what else could turn it.
        data: verdict.json.
    """

    word: str
    because: str
    but: list[str]
    next: str
    besides: list[str]
    data: dict[str, Any]

    @property
    def is_known(self) -> bool:
        return self.word != UNKNOWN

    @property
    def hangs_on_training(self) -> bool:
        """Whether speed has a word, and that what is faster learns as much was not to be shown by one training."""
        return not self.is_known and any((of["state"], of["n"]) == (NOT_SHOWN, 1) for of in self.data["quality"])


def reach_answer(runs: Sequence[Run], margins: Margins = DEFAULT) -> Answer:
    """What the finished runs of one comparison say.

    A kind that is shown to learn less than its opponent gives way to the next of its side; where there is none, speed
    is no answer.
    """
    field = Field.of(runs)
    dropped: list[Kind] = []
    while True:
        of = sides(field, dropped)
        outcome = race.run(field, of, margins.speed)
        tested = _test(field, outcome, margins)
        worse = next((kind for kind, result in tested.items() if result.state == WORSE), None)
        if worse is None or len(of.rings if worse in of.rings else of.servers) < 2:
            break
        dropped.append(worse)
    outcome = replace(outcome, word=_with_quality(field, outcome, tested))
    case = Case(field, of, outcome, tested, dropped, margins)
    then, could_turn = _next(case), [line for doubt in DOUBTS for line in doubt(case)]
    because, but = _because(case) + then.tells, could_turn[:BUTS]
    data = {"answer": outcome.word, "because": because, "but": but, "next": then.command} | _figures(case, then)
    return Answer(outcome.word, because, but, then.command, could_turn[BUTS:], data)


def _test(field: Field, outcome: Outcome, margins: Margins) -> dict[Kind, Quality]:
    """How those that the word speaks for stand to their opponents, where they differ in more than speed."""
    if outcome.word not in (RING, SERVERS, EITHER) or not outcome.pair:
        return {}
    one, other = outcome.pair
    pairs = [(one, other), (other, one)] if outcome.word == EITHER else [(one, other)]
    return {a: quality.compare(field, a, b, margins.accuracy) for a, b in pairs}


def _with_quality(field: Field, outcome: Outcome, tested: dict[Kind, Quality]) -> str:
    """The word, unless what is faster is not shown to learn as much. Where it missed the target that its opponent
    reached, that one is the answer.
    """
    if all(result.state not in (WORSE, NOT_SHOWN) for result in tested.values()) or not outcome.pair:
        return outcome.word
    worse = next((kind for kind, result in tested.items() if result.state == WORSE), outcome.pair[0])
    other = outcome.pair[worse == outcome.pair[0]]
    less, more = (figures.mean(trained(field, kind), figures.accuracy) or 0.0 for kind in (worse, other))
    is_told = tested[worse].state == WORSE and other.family != worse.family
    aim = _target(field) or 1.0
    return race.OF_FAMILY.get(other.family, UNKNOWN) if is_told and less < aim - FAR_BELOW and more >= aim else UNKNOWN


def _target(field: Field) -> float | None:
    runs = (run for members in field.by_kind.values() for run in whole(members))
    return next((run.summary.target_accuracy for run in runs if run.summary.target_accuracy), None)


# Why


def _because(case: Case) -> str:
    """The figures that decide."""
    outcome, field = case.outcome, case.field
    lacking = next(((k, result) for k, result in case.tested.items() if result.state in (WORSE, NOT_SHOWN)), None)
    if not outcome.pair:
        return f"there is nothing to compare {', '.join(kind.label for kind in field.by_kind)} with"
    shown = outcome.open[0] if outcome.open else outcome.race
    assert shown
    text = _lead(case, shown.turned)
    if outcome.word == ONE_MACHINE and shown.lead.mean > 0:
        text += f": distribution that is not {case.margins.speed:.0%} faster does not pay"
    if outcome.word == EITHER:
        text += f": a lead too small to matter beside a margin of {case.margins.speed:.0%}"
    if outcome.word in (RING, SERVERS, EITHER) and outcome.main and outcome.gate:
        text += f", and {figures.times(figures.ratio(outcome.gate.lead)[0])} times those of {outcome.gate.other.label}"
    if lacking:
        kind, of = lacking
        if not of.difference:
            return f"{text}, but what {kind.label} learns beside that was not measured"
        is_not = "is not" if of.state == WORSE else "is not shown to be"
        points = f"{100 * case.margins.accuracy:.3g} points"
        return f"{text}, but the accuracy of {kind.label}, {_accuracies(case, kind)}, {is_not} within {points}"
    for kind, result in list(case.tested.items())[:1]:
        text += f"; {result.state if result.state == quality.SAME else f'as accurate, {_accuracies(case, kind)}'}"
    return text


def _lead(case: Case, shown: Race) -> str:
    """`allreduce ×2 did 1.28 times the samples/s of ps-sync ×2+1, the best of 4 servers (1.19 to 1.37, 10 repeats)`."""
    one, other = (_best(case, shown, kind) for kind in (shown.one, shown.other))
    comma = "," if "," in one else ""
    ratio, *ends = (figures.times(value) for value in figures.ratio(shown.lead) if value is not None)
    interval = f"{' to '.join(ends)}, " if shown.lead.n > 2 else ""
    return f"{one}{comma} did {ratio} times the samples/s of {other} ({interval}{with_noun(shown.lead.n, 'repeat')})"


def _best(case: Case, shown: Race, kind: Kind) -> str:
    group = next((side for side in case.of[:3] if kind in side), [kind])
    words = {modes.RING: "rings", modes.SERVERS: "servers", modes.ONE_MACHINE: "machines"}
    gate = case.outcome.gate
    if gate and shown in (gate, gate.turned) and kind.is_distributed and len(case.of.distributed) > 1:
        return f"{kind.label}, the best that is distributed"
    is_among = len(group) > 1 and case.of.rings and case.of.servers
    return f"{kind.label}, the best of {len(group)} {words[kind.family]}" if is_among else kind.label


def _accuracies(case: Case, kind: Kind) -> str:
    both = sorted((named for named, _ in case.named), key=lambda named: named != kind)
    means = (figures.mean(trained(case.field, named), figures.accuracy) for named in both)
    return " beside ".join("none" if value is None else f"{value:.3f}" for value in means)


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
    repeats, add = max(run.manifest.repeat for run in runs), _missing(case.of)
    if case.outcome.open:
        return _more_repeats(case, runs, repeats)
    if case.outcome.word == UNKNOWN and case.tested:
        return _more_training(case, runs, repeats)
    if add or not case.outcome.pair:
        return _comparison(runs, max(repeats, LOOKS[0]), add=add)
    if case.of.left_out:
        return _comparison(runs, repeats + LOOKS[0])
    wanted = {word: family for family, word in race.OF_FAMILY.items()} | {ONE_MACHINE: modes.ONE_MACHINE}
    answering = [kind for kind in case.outcome.pair if kind.family == wanted.get(case.outcome.word)]
    winners = case.field.by_kind[(answering or case.outcome.pair)[0]]
    run = (whole(winners) or winners)[0]
    samples, speed = DEFAULT_EPOCHS * (run.manifest.train_samples or 0), run.summary.samples_per_s
    guess = samples / speed if speed else None
    return Next(commands.run_command(run), guess if run.manifest.sprint else run.summary.wall_s)


def _missing(of: Sides) -> list[str]:
    """A mode of each family of which no run is there, though it would have to be compared."""
    tried = {kind.family for kind in (*of.distributed, *of.machines, *of.left_out)}
    wanted = [modes.ONE_MACHINE, *([modes.RING, modes.SERVERS] if len(of.distributed) < 2 else [])]
    first = {modes.declared(name).family: name for name in reversed(modes.names())}
    return [first[family] for family in wanted if family not in tried]


def _comparison(runs: Sequence[Run], repeats: int, tells: str = "", add: Sequence[str] = (), **more: Any) -> Next:
    """The same comparison with so many repeats, or trainings, and how long what is not there yet takes."""
    trainings = more.get("trainings", 0)
    made = (whole(runs) if trainings else []) or runs
    to_do = (trainings or repeats) * (len({run.kind for run in made}) + len(add))
    to_do = commands.LONGER * to_do if more.get("longer") else max(1, to_do - len(timed(made)))
    command = commands.compare_command(runs, repeats, add, **more)
    return Next(command, to_do * mean_time_s(made), tells, repeats)


def _more_repeats(case: Case, runs: Sequence[Run], repeats: int) -> Next:
    races, margin = case.outcome.open, case.margins.speed
    each = [rule.repeats_needed(of.lead, margin, of.turned.sizes[0], of is case.outcome.gate) for of in races]
    done = min(of.lead.n for of in races)
    add = [] if case.of.machines else _missing(case.of)[:1]
    if None in each:
        tells = f": not even {LOOKS[-1]} repeats would tell, longer runs may"
        return _comparison(runs, LOOKS[0], tells, add, longer=commands.SPRINTS)
    needed = max(filter(None, each))
    tells = f": {needed} or more repeats would tell" if done < 2 else f": about {needed} repeats would tell"
    return _comparison(runs, needed + repeats - done, tells, add)  # some have no other beside them


def _more_training(case: Case, runs: Sequence[Run], repeats: int) -> Next:
    """Where accuracies are far below the target, longer trainings tell, and more of them do not."""
    target, trainings = _target(case.field) or 0.0, whole(runs)
    best = max(figures.mean(trained(case.field, kind), figures.accuracy) or 0.0 for kind, _ in case.named)
    if trainings and best < target - FAR_BELOW:
        tells = f": trained too briefly for {target:g}"
        return _comparison(runs, max(repeats, LOOKS[0]), tells, longer=commands.TRAININGS)
    more = next(
        (look for look in LOOKS if look > max((run.manifest.repeat for run in trainings), default=0)), LOOKS[-1]
    )
    if len(trainings) == len(runs):
        return _comparison(runs, more, f": about {more} repeats would tell")
    return _comparison(runs, repeats, f": about {more} trainings would tell", trainings=more)


# verdict.json


def _figures(case: Case, then: Next) -> dict[str, Any]:
    outcome, field = case.outcome, case.field
    reference, pair = figures.reference(field, case.of), outcome.pair
    tested = [
        {"run": kind.label, "state": result.state, "paired_by": result.by} | figures.difference_data(result.difference)
        for kind, result in case.tested.items()
    ]
    return {
        "next_s": then.seconds, "margin": case.margins.speed, "accuracy_margin": case.margins.accuracy,
        "speed": figures.race_data(outcome.main), "one_machine": figures.race_data(outcome.gate),
        "repeats_needed": then.repeats, "quality": tested, "target": _target(field),
        "time_to_target": figures.ratio_of_times(field.by_kind[pair[0]], field.by_kind[pair[1]]) if pair else None,
        "beside": "ring" if reference.family == modes.RING else reference.label,
        "runs": figures.rows(field, reference),
        "left_out": [kind.label for kind in (*case.of.left_out, *case.dropped)],
    }  # fmt: skip
