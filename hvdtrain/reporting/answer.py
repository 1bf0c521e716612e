"""The answer of a comparison: one word, why, what could turn it, and what to do next.

README.md beside this file says what the word means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import to_builtins

from hvdtrain.base import modes
from hvdtrain.reporting import figures, quality, steps_and_samples
from hvdtrain.reporting.conduct import Conduct, LeftOut
from hvdtrain.reporting.contenders import DEFAULT, Contenders, Margins, Sides, choose_sides
from hvdtrain.reporting.doubts import DOUBTS, Evidence
from hvdtrain.reporting.measures import MEASURES, SPEED, Measure
from hvdtrain.reporting.next_command import NextCommand, next_command
from hvdtrain.reporting.quality import FAR_BELOW, NOT_SHOWN, WORSE, Quality, trained
from hvdtrain.reporting.race import (
    EITHER,
    ONE_MACHINE_WINS,
    ONE_PROCESS,
    RING_WINS,
    SERVERS_WIN,
    UNKNOWN,
    WORD_OF_FAMILY,
    Verdict,
    judge_races,
)
from hvdtrain.reporting.reasons import because, lean
from hvdtrain.reporting.rule import LOOKS
from hvdtrain.runs.fields import core_sharing
from hvdtrain.runs.read import Kind, Run

# How many doubts stand beside the answer.
MOST_BUTS = 2
# The conduct of runs of which nobody knows how they were chosen.
UNKNOWN_CONDUCT = Conduct()


@dataclass(frozen=True)
class Answer:
    """What a comparison says.

    Attributes:
        word: RING_WINS, SERVERS_WIN, EITHER, ONE_MACHINE_WINS, on a single host ONE_PROCESS, or
            UNKNOWN.
        because: the deciding figures, in a sentence that can stand alone.
        but: what could turn the answer, MOST_BUTS lines at most.
        next: one command.
        besides: what else could turn the answer.
        data: verdict.json.
        compares: whether there are two contenders to compare. If not, no number of repeats gives an
            answer.
    """

    word: str
    because: str
    but: list[str]
    next: str
    besides: list[str]
    data: dict[str, Any]
    compares: bool = True

    @property
    def headline(self) -> str:
        """The word, and what decided if that is not the speed: `RING by time to 0.9, and by speed`.

        If the speed says something else, that stands there too.
        """
        by_speed = self.data["by_speed"]
        if not by_speed:
            return self.word
        target = f"{self.data['target'] or 0:g}"
        if self.data["target_of"] == "loss":
            target = f"a loss of {target}"
        headline = f"{self.word} by time to {target}"
        if by_speed["answer"] == UNKNOWN:
            return headline
        if by_speed["answer"] == self.word:
            return f"{headline}, and by speed"
        return f"{headline}, {by_speed['answer']} by speed"

    @property
    def word_by_speed(self) -> str:
        by_speed = self.data["by_speed"]
        return str(by_speed["answer"]) if by_speed else self.word

    @property
    def is_known(self) -> bool:
        return self.word != UNKNOWN

    def is_told_by_repeats(self, done: int) -> bool:
        """Returns whether only repeats are missing for an answer, and more of them than `done`."""
        return not self.is_known and (self.data["repeats_needed"] or 0) > done

    @property
    def hangs_on_training(self) -> bool:
        """Whether one more training may decide.

        So it is if speed decides, but one training could not show that the faster contender learns
        as much.
        """
        if self.is_known:
            return False
        rows = self.data["quality"]
        return any(row["state"] == NOT_SHOWN and row["n"] == 1 for row in rows)


def reach_answer(
    runs: Sequence[Run], margins: Margins = DEFAULT, conduct: Conduct = UNKNOWN_CONDUCT
) -> Answer:
    """Returns what the finished runs of one comparison say.

    If speed decides, a kind that is shown to learn less than its opponent gives way to the next of
    its side. If there is no other, speed is no answer. If the time to the target decides, whoever
    reaches it has learned enough, and what speed alone says stands beside the answer.

    Args:
        runs: the runs of one comparison.
        margins: the smallest differences that matter.
        conduct: what else was done, which the runs do not tell.
    """
    measure = MEASURES[conduct.decided_by]
    evidence = _weigh(runs, measure, margins, conduct)
    by_speed = None
    if measure is not SPEED:
        speeds = _weigh(runs, SPEED, margins, conduct, quality_counts=False)
        by_speed = {"answer": _word_for(speeds, runs), "because": because(speeds)}
    return _answer(evidence, _word_for(evidence, runs), by_speed)


def _weigh(
    runs: Sequence[Run],
    measure: Measure,
    margins: Margins,
    conduct: Conduct,
    quality_counts: bool = True,
) -> Evidence:
    """Returns what the runs say by a measure.

    Args:
        runs: the runs of one comparison.
        measure: what decides.
        margins: the smallest differences that matter.
        conduct: what else was done.
        quality_counts: whether the faster contender has to be shown to learn as much, if the
            measure is the speed.
    """
    contenders = Contenders.of(runs, measure)
    tests_quality = quality_counts and measure is SPEED
    dropped: list[Kind] = []
    while True:
        sides = choose_sides(contenders, dropped)
        verdict = judge_races(contenders, sides, margins.speed)
        qualities = {}
        if tests_quality:
            qualities = _compare_quality(contenders, verdict, margins.accuracy)
        worse = _shown_worse(qualities)
        if worse is None or not _has_another(sides, worse):
            break
        dropped.append(worse)
    verdict = replace(verdict, word=_word_with_quality(contenders, verdict, qualities))
    if verdict.word == ONE_MACHINE_WINS and not _exceeds_sharing(contenders, verdict):
        verdict = replace(verdict, word=UNKNOWN, explained_by_sharing=True)
    return Evidence(contenders, sides, verdict, qualities, dropped, margins, conduct)


def _word_for(evidence: Evidence, runs: Sequence[Run]) -> str:
    """Returns the word of the evidence. On a single host one machine is one process."""
    word = evidence.verdict.word
    return ONE_PROCESS if word == ONE_MACHINE_WINS and _on_one_host(runs) else word


def _answer(evidence: Evidence, word: str, by_speed: dict[str, str] | None) -> Answer:
    """Returns the answer that rests on this evidence.

    Args:
        evidence: by the measure that decides.
        word: the answer.
        by_speed: what the speed says alone, if it does not decide.
    """
    command = next_command(evidence)
    reason = because(evidence) + command.purpose
    could_turn: list[str] = []
    for doubt in DOUBTS:
        could_turn += doubt(evidence)
    but = could_turn[:MOST_BUTS]
    said = {"answer": word, "because": reason, "but": but, "next": command.command}
    return Answer(
        word=word,
        because=reason,
        but=but,
        next=command.command,
        besides=could_turn[MOST_BUTS:],
        data=said | _figures(evidence, command) | {"by_speed": by_speed},
        compares=bool(evidence.verdict.pair),
    )


def _on_one_host(runs: Sequence[Run]) -> bool:
    hosts: set[str] = set()
    for run in runs:
        hosts.update(run.manifest.hardware.hosts)
    return len(hosts) <= 1


def _has_another(sides: Sides, kind: Kind) -> bool:
    """Returns whether the kind's side has another kind."""
    side = sides.rings if kind in sides.rings else sides.servers
    return len(side) > 1


def _exceeds_sharing(contenders: Contenders, verdict: Verdict) -> bool:
    """Returns whether one machine leads by more than hosts lose that share cores.

    Hosts of one machine may claim more cores than there are. Distributed workers then compute more
    slowly than on machines, by that factor at most.
    """
    assert verdict.over_machine
    distributed_runs = contenders.by_kind[verdict.over_machine.one]
    sharing = max(core_sharing(run) for run in distributed_runs)
    lead_of_machine = -float(verdict.over_machine.lead.high)
    return sharing == 1.0 or lead_of_machine > math.log(sharing)


# Whether the faster contender learns as much


def _compare_quality(
    contenders: Contenders, verdict: Verdict, margin: float
) -> dict[Kind, Quality]:
    """Returns how the kinds that the word speaks for compare with their opponents in accuracy."""
    if verdict.word not in (RING_WINS, SERVERS_WIN, EITHER) or not verdict.pair:
        return {}
    faster, slower = verdict.pair
    qualities = {faster: quality.compare(contenders, faster, slower, margin)}
    if verdict.word == EITHER:
        qualities[slower] = quality.compare(contenders, slower, faster, margin)
    return qualities


def _shown_worse(qualities: dict[Kind, Quality]) -> Kind | None:
    """Returns the first kind that is shown to learn less; None if no kind is."""
    for kind, result in qualities.items():
        if result.state == WORSE:
            return kind
    return None


def _word_with_quality(
    contenders: Contenders, verdict: Verdict, qualities: dict[Kind, Quality]
) -> str:
    """Returns the word of the speeds if the faster contender is known to learn as much.

    Otherwise nothing is known, with one exception: if the faster contender missed the target that
    its opponent of the other family reached, the opponent is the answer.
    """
    is_in_doubt = any(result.state in (WORSE, NOT_SHOWN) for result in qualities.values())
    if not is_in_doubt or not verdict.pair:
        return verdict.word
    worse = _shown_worse(qualities)
    if worse is None:
        return UNKNOWN
    faster, slower = verdict.pair
    better = slower if worse == faster else faster
    if better.family == worse.family:
        return UNKNOWN
    target = figures.target_accuracy(contenders) or 1.0
    has_missed = _mean_accuracy(contenders, worse) < target - FAR_BELOW
    has_reached = _mean_accuracy(contenders, better) >= target
    if not (has_missed and has_reached):
        return UNKNOWN
    return WORD_OF_FAMILY.get(better.family, UNKNOWN)


def _mean_accuracy(contenders: Contenders, kind: Kind) -> float:
    """Returns the mean accuracy of a kind's trainings; 0 if none was measured."""
    return figures.mean(trained(contenders, kind), figures.accuracy) or 0.0


# verdict.json


def _figures(evidence: Evidence, command: NextCommand) -> dict[str, Any]:
    """Returns the figures of an answer for verdict.json."""
    contenders = evidence.contenders
    verdict = evidence.verdict
    reference = figures.reference_kind(contenders, evidence.sides)
    time_to_target = None
    if verdict.pair:
        runs, opponent_runs = [contenders.by_kind[kind] for kind in verdict.pair]
        time_to_target = figures.ratio_of_times(runs, opponent_runs)
    target = figures.target(contenders)
    return {
        "decided_by": contenders.measure.name,
        "next_s": command.seconds,
        "margin": evidence.margins.speed,
        "accuracy_margin": evidence.margins.accuracy,
        "speed": figures.race_data(verdict.main),
        "one_machine": figures.race_data(verdict.over_machine),
        "leans": lean(evidence),
        "repeats_needed": command.repeats,
        "quality": [_quality_row(kind, result) for kind, result in evidence.qualities.items()],
        "target": target.value if target else None,
        "target_of": target.what if target else None,
        "time_to_target": time_to_target,
        "steps_and_samples": _steps_and_samples(evidence),
        "beside": "ring" if reference.family == modes.RING else reference.label,
        "runs": figures.rows(contenders, reference),
        "tried": to_builtins(dict(evidence.conduct.tried)),
        "rates": to_builtins(list(evidence.conduct.rates)),
        "left_out": _left_out(evidence),
        "disturbed": evidence.conduct.disturbed,
    }


def _steps_and_samples(evidence: Evidence) -> dict[str, Any] | None:
    """Returns the parts of the ratio of times: of the slower contender over the faster."""
    if not evidence.verdict.pair:
        return None
    (faster, runs), (slower, slower_runs) = evidence.opponents
    parts = steps_and_samples.parts(slower_runs, runs)
    return parts.data(slower.label, faster.label, evidence.margins.speed) if parts else None


def _quality_row(kind: Kind, result: Quality) -> dict[str, Any]:
    row = {"run": kind.label, "state": result.state, "paired_by": result.paired_by}
    return row | figures.difference_data(result.difference)


def _left_out(evidence: Evidence) -> list[dict[str, str]]:
    """Returns who is not compared, and why.

    A contender is left out after the search, for too few repeats, or because it learns less.
    """
    few = []
    for kind in evidence.sides.left_out:
        few.append(LeftOut(kind.label, f"fewer than {LOOKS[0]} repeats beside the others"))
    worse = []
    for kind in evidence.dropped:
        accuracy = _mean_accuracy(evidence.contenders, kind)
        worse.append(LeftOut(kind.label, f"it learned less: accuracy {accuracy:.3f}"))
    return to_builtins([*evidence.conduct.left_out, *few, *worse])
