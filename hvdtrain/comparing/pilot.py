"""Which contenders are worth repeating, and which of them are trained to the end.

The pilot is a short sprint of each, which does not count: choosing and judging use different runs.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Sequence

from hvdtrain import modes
from hvdtrain.comparing.forecast import Record
from hvdtrain.comparing.grid import Planned
from hvdtrain.runs.read import grouped
from hvdtrain.runs.request import mathematics, mode_options

Rivalry = Callable[[Planned], Hashable]  # equal of contenders of which not all are repeated

PILOT_S = 1.5
FAR_BEHIND = 0.7  # of the samples/s of the best of a family
FIRST = (modes.RING, modes.SERVERS, modes.ONE_MACHINE)  # whose training stands for a mathematics
HALF = 0.5  # of one machine's samples/s, below which nobody would train
of_a_side: Rivalry = operator.attrgetter("side")  # rivals are those of a family, on so many workers


def but_for_the_wire(run: Planned) -> Hashable:
    """Rivals are those that differ in their wire alone."""
    return run.side, dataclasses.replace(run.config, wire="")


def needs_pilot(contenders: Sequence[Planned], record: Record, rivalry: Rivalry = of_a_side) -> list[Planned]:
    """Those of which it is open whether they are repeated, and which have not run."""
    return [
        run
        for rivals in grouped(contenders, rivalry).values()
        for run in rivals
        if len(rivals) > 1 and not record.speed(run)
    ]


def leave_out(contenders: Sequence[Planned], record: Record, rivalry: Rivalry = of_a_side) -> list[str]:
    """Write down which contenders are left out, a line each; what was decided before stays.

    Of several wires a mode's fastest is taken; of rivals, those that are not far behind the best.
    """
    lines = []
    piloted = [run for run in contenders if record.speed(run)]
    for rivals in grouped(piloted, rivalry).values():
        best = max(rivals, key=record.speed)
        for run in rivals:
            twins = [other for other in rivals if but_for_the_wire(other) == but_for_the_wire(run)]
            twin = max(twins, key=record.speed)
            known = record.contenders[run.contender]
            ahead = twin if twin is not run else best if record.speed(run) < FAR_BEHIND * record.speed(best) else None
            if "left_out" not in known:
                rate = record.speed(run) / record.speed(ahead) if ahead else 1
                known["left_out"] = f"{rate:.2f} times the samples/s of {ahead.contender} in the pilot" if ahead else ""
            if known["left_out"]:
                lines.append(f"left out: {run.contender}: {known['left_out']}")
    return lines


def taken(contenders: Sequence[Planned], record: Record) -> list[Planned]:
    """Those that are not left out; of each family one at least."""
    staying = [
        [run for run in rivals if not record.left_out(run)] or [max(rivals, key=record.speed)]
        for rivals in grouped(contenders, of_a_side).values()
    ]
    return list(itertools.chain(*staying))


def trainings(contenders: Sequence[Planned], record: Record, kept: Collection[str]) -> list[Planned]:
    """Of each mathematics one contender, trained as a whole, among those that reach half of one machine's speed.

    Args:
        kept: names of runs that are there: what is trained already stays the one that is.
    """
    chosen = []
    for place in grouped(contenders, lambda run: run.where).values():
        alone = max((record.speed(run) for run in place if run.family == modes.ONE_MACHINE), default=0.0)
        able = [dataclasses.replace(run, after_sprints=True) for run in place if record.speed(run) >= HALF * alone]
        by_steps = grouped(able, lambda run: mathematics(run.config.mode, run.workers, mode_options(run.config)))
        for same in by_steps.values():
            is_there = [run for run in same if run.name in kept]
            chosen.append(min(is_there or same, key=lambda run: (FIRST.index(run.family), -record.speed(run))))
    return chosen
