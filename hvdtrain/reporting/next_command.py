"""What to do next: one command, and about how long that takes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import DEFAULT_EPOCHS
from hvdtrain.reporting import figures, rule
from hvdtrain.reporting.contenders import Sides, seconds_per_run
from hvdtrain.reporting.doubts import Evidence, busy_runs
from hvdtrain.reporting.measures import SPEED, TIME_TO_TARGET, only_trainings, speed_runs
from hvdtrain.reporting.quality import FAR_BELOW, NOT_SHOWN, trained
from hvdtrain.reporting.race import ONE_MACHINE_WINS, UNKNOWN, WORD_OF_FAMILY, Race
from hvdtrain.reporting.rule import LOOKS
from hvdtrain.runs import command_lines
from hvdtrain.runs.read import Run


class NextCommand(NamedTuple):
    """A command.

    Attributes:
        command: the command line.
        seconds: about how long it takes; None if that is not known.
        purpose: what the command is for, as the end of `because`.
        repeats: after how many repeats there is an answer; None if no number would do, or if
            repeats are not what is missing.
    """

    command: str
    seconds: float | None
    purpose: str = ""
    repeats: int | None = None


def next_command(evidence: Evidence) -> NextCommand:
    """Returns the command that takes the answer furthest.

    As long as something is missing for an answer, that is what it makes. Afterwards it trains in
    the winning mode.
    """
    verdict = evidence.verdict
    runs = _compared_runs(evidence)
    repeats = max(run.manifest.repeat for run in runs)
    missing = _missing_modes(evidence.sides)
    if verdict.explained_by_sharing:
        return _hosts_with_parts(runs)
    if verdict.undecided:
        return _more_repeats(evidence, runs, repeats)
    if verdict.word == UNKNOWN and evidence.qualities:
        return _more_training(evidence, runs, repeats)
    if missing or not verdict.pair:
        return _comparison(evidence, runs, max(repeats, LOOKS[0]), add=missing)
    if evidence.sides.left_out:
        return _comparison(evidence, runs, repeats + LOOKS[0])
    return _training_of_winner(evidence)


def _compared_runs(evidence: Evidence) -> list[Run]:
    """Returns the runs without baselines of scaling; all runs if there are no others."""
    compared = []
    everything = []
    for kind, runs in evidence.contenders.by_kind.items():
        everything += runs
        if kind.family:
            compared += runs
    return compared or everything


def _missing_modes(sides: Sides) -> list[str]:
    """Returns a mode of each family that should be compared and has no run."""
    tried = {kind.family for kind in (*sides.distributed, *sides.machines, *sides.left_out)}
    wanted = [modes.ONE_MACHINE]
    if len(sides.distributed) < 2:
        wanted += [modes.RING, modes.SERVERS]
    first_of_family = {modes.declared(name).family: name for name in reversed(modes.names())}
    return [first_of_family[family] for family in wanted if family not in tried]


def _hosts_with_parts(runs: Sequence[Run]) -> NextCommand:
    """Returns the command that makes as many hosts, each with its part of the cores."""
    hosts = max((run.manifest.hosts for run in runs), key=len)
    cores = max((host.cores or 1 for host in hosts.values()), default=1)
    cores_each = cores / len(hosts)
    return NextCommand(f"hvdtrain hosts up --count {len(hosts)} --cpus {cores_each:.2g}", None)


def _training_of_winner(evidence: Evidence) -> NextCommand:
    """Returns the command that trains in the mode that won."""
    verdict = evidence.verdict
    assert verdict.pair
    family_of_word = {word: family for family, word in WORD_OF_FAMILY.items()}
    family_of_word[ONE_MACHINE_WINS] = modes.ONE_MACHINE
    wanted = family_of_word.get(verdict.word)
    answering = [kind for kind in verdict.pair if kind.family == wanted]
    winner = (answering or verdict.pair)[0]
    runs = evidence.contenders.by_kind[winner]
    run = (only_trainings(runs) or runs)[0]
    seconds = run.summary.wall_s
    if run.manifest.sprint:
        samples = DEFAULT_EPOCHS * (run.manifest.train_samples or 0)
        speed = run.summary.samples_per_s
        seconds = samples / speed if speed else None
    return NextCommand(command_lines.run_command(run), seconds)


def _comparison(
    evidence: Evidence,
    runs: Sequence[Run],
    repeats: int,
    purpose: str = "",
    add: Sequence[str] = (),
    longer: str = "",
    trainings: int = 0,
) -> NextCommand:
    """Returns the command that continues the comparison.

    Args:
        evidence: what is known.
        runs: the runs so far.
        repeats: how many repeats there will be.
        purpose: see NextCommand.
        add: modes that join.
        longer: SPRINTS or TRAININGS of command_lines: those take longer, and all are made anew.
        trainings: how many whole runs of each kind there will be; 0 for as many as there are.
    """
    counted = (only_trainings(runs) if trainings else []) or runs
    kinds = {run.kind for run in counted}
    to_do = (trainings or repeats) * (len(kinds) + len(add))
    if longer:
        to_do *= command_lines.LONGER
    elif command_lines.can_be_continued(runs):
        to_do = max(1, to_do - len(speed_runs(counted)))
    measure = evidence.contenders.measure
    decide_by = "" if measure is SPEED else measure.name
    command = command_lines.compare_command(
        runs,
        repeats,
        add,
        longer,
        trainings,
        decide_by,
        evidence.conduct.threads,
        evidence.conduct.given,
    )
    return NextCommand(command, to_do * seconds_per_run(counted), purpose, repeats)


def _more_repeats(evidence: Evidence, runs: Sequence[Run], repeats: int) -> NextCommand:
    """Returns the command that makes as many repeats as the speeds need to decide.

    Args:
        evidence: what is known.
        runs: the compared runs.
        repeats: the largest number of a repeat so far.
    """
    sides = evidence.sides
    undecided = evidence.verdict.undecided
    margin = evidence.margins.speed
    needed = []
    for race in undecided:
        size = race.faster_first.sizes[0]
        against_machine = race is evidence.verdict.over_machine
        needed.append(rule.repeats_needed(race.lead, margin, size, against_machine))
    enough = [number for number in needed if number is not None]
    done = min(race.lead.n for race in undecided)
    add = [] if sides.machines else _missing_modes(sides)[:1]
    busy, counted = busy_runs(evidence)
    quiet = ""
    if busy:
        beside = f"other work ran beside {len(busy)} of {counted} runs"
        quiet = f", when the machine is quiet: {beside}"
    if any(_ended_too_soon(evidence, race.faster_first) for race in undecided):
        purpose = ": trainings ended without the target, and longer ones would tell"
        return _longer_trainings(evidence, runs, repeats, purpose)._replace(repeats=None)
    if len(enough) < len(needed) and evidence.contenders.measure is TIME_TO_TARGET:
        purpose = f": perhaps even {LOOKS[-1]} repeats would not be enough{quiet}"
        return _comparison(evidence, runs, LOOKS[-1], purpose, add)._replace(repeats=None)
    if len(enough) < len(needed):
        purpose = f": even {LOOKS[-1]} repeats would not be enough; try longer runs{quiet}"
        command = _comparison(evidence, runs, LOOKS[0], purpose, add, longer=command_lines.SPRINTS)
        return command._replace(repeats=None)
    most = max(enough)
    if done < 2:
        purpose = f": {most} or more repeats would tell{quiet}"
    else:
        purpose = f": about {most} repeats would tell{quiet}"
    # A repeat that has no other beside it does not count, so that `repeats` may exceed `done`.
    return _comparison(evidence, runs, most + repeats - done, purpose, add)


def _ended_too_soon(evidence: Evidence, race: Race) -> bool:
    """Returns whether no number of repeats would tell, because trainings ended without the target.

    So it is if those of the side ahead did, since it cannot be shown to be ahead then, and if all
    did.

    Args:
        evidence: what is known.
        race: with the faster contender first.
    """
    if evidence.contenders.measure is not TIME_TO_TARGET:
        return False
    reaches = figures.reaches(evidence.contenders.by_kind[race.one])
    if not any(reach.is_reached for reach in reaches):
        return True
    return race.lead.n > 1 and race.lead.low == -math.inf


def _more_training(evidence: Evidence, runs: Sequence[Run], repeats: int) -> NextCommand:
    """Returns the command that makes as many trainings as it takes to compare the accuracy.

    If accuracies are far below the target, longer trainings tell more than more of them.

    Args:
        evidence: what is known.
        runs: the compared runs.
        repeats: the largest number of a repeat so far.
    """
    target = figures.target_accuracy(evidence.contenders) or 0.0
    trainings = only_trainings(runs)
    accuracies = []
    for kind, _ in evidence.opponents:
        accuracy = figures.mean(trained(evidence.contenders, kind), figures.accuracy)
        accuracies.append(accuracy or 0.0)
    if trainings and max(accuracies) < target - FAR_BELOW:
        purpose = f": trained too briefly for {target:g}"
        return _longer_trainings(evidence, runs, repeats, purpose)
    needed = []
    for result in evidence.qualities.values():
        if result.state == NOT_SHOWN:
            needed.append(result.trainings_needed)
    enough = [number for number in needed if number is not None]
    if len(enough) < len(needed):
        purpose = (
            f": even {LOOKS[-1]} trainings would not be enough; more validation images may help"
        )
        return _longer_trainings(evidence, runs, repeats, purpose)._replace(repeats=None)
    most = max(enough, default=LOOKS[0])
    if len(trainings) == len(runs):
        return _comparison(evidence, runs, most, f": about {most} repeats would tell")
    purpose = f": about {most} trainings would tell"
    return _comparison(evidence, runs, repeats, purpose, trainings=most)


def _longer_trainings(
    evidence: Evidence, runs: Sequence[Run], repeats: int, purpose: str
) -> NextCommand:
    longer = command_lines.TRAININGS
    return _comparison(evidence, runs, max(repeats, LOOKS[0]), purpose, longer=longer)
