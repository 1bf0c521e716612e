"""Who is ahead by the measure that decides: rings or servers, distribution or one machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.base import modes
from hvdtrain.reporting import rule
from hvdtrain.reporting.contenders import Contenders, Sides
from hvdtrain.reporting.rule import AHEAD, BEHIND, LEVEL, OPEN, Lead
from hvdtrain.runs.read import Kind

RING_WINS = "RING"
SERVERS_WIN = "SERVERS"
EITHER = "EITHER"
ONE_MACHINE_WINS = "ONE MACHINE"
# The word in place of ONE_MACHINE_WINS if all ran on one host, so that everything is one machine.
ONE_PROCESS = "ONE PROCESS"
UNKNOWN = "NOT YET KNOWN"
WORD_OF_FAMILY = {modes.RING: RING_WINS, modes.SERVERS: SERVERS_WIN}


@dataclass(frozen=True)
class Race:
    """The best contender of one side against the best of the other.

    Attributes:
        one: the best of the first side.
        other: the best of the second side.
        lead: of `one` over `other`.
        sizes: how many contenders each side has. The allowed error of the lead's low end is divided
            among those of the first side, and the error of the high end among those of the second.
    """

    one: Kind
    other: Kind
    lead: Lead
    sizes: tuple[int, int]

    @property
    def faster_first(self) -> "Race":
        """The same race with the faster contender as `one`."""
        mean, low, high, deviation, n = self.lead
        if mean >= 0:
            return self
        return Race(self.other, self.one, Lead(-mean, -high, -low, deviation, n), self.sizes[::-1])

    @classmethod
    def between(
        cls, contenders: Contenders, first_side: Sequence[Kind], second_side: Sequence[Kind]
    ) -> "Race | None":
        """Returns the race between two sides; None if one of them is empty."""
        if not first_side or not second_side:
            return None
        log_ratios = [[contenders.log_ratios(a, b) for b in second_side] for a in first_side]
        means = [[rule.estimate_lead(logs).mean for logs in row] for row in log_ratios]
        worst_of_row = [min(row) for row in means]
        worst_of_column = [max(column) for column in zip(*means, strict=True)]
        one = first_side[worst_of_row.index(max(worst_of_row))]
        other = second_side[worst_of_column.index(min(worst_of_column))]
        lead = rule.best_over_best(log_ratios)
        return cls(one, other, lead, (len(first_side), len(second_side)))


@dataclass(frozen=True)
class Verdict:
    """Who is ahead by the measure that decides: speed, or the time to the target.

    Attributes:
        word: see Answer.
        main: rings against servers; if there is only one of these families, its first mode against
            its others.
        over_machine: distributed contenders against single machines.
        undecided: those of the two races that are not decided.
        explained_by_sharing: one machine leads by no more than hosts lose that share the cores of
            one machine.
    """

    word: str
    main: Race | None
    over_machine: Race | None
    undecided: tuple[Race, ...] = ()
    explained_by_sharing: bool = False

    @property
    def deciding_race(self) -> Race | None:
        """The race that the word is about."""
        if self.word == ONE_MACHINE_WINS or self.explained_by_sharing or not self.main:
            return self.over_machine
        return self.main

    @property
    def pair(self) -> tuple[Kind, Kind] | None:
        """The faster of the two contenders that the word is about, and its opponent."""
        if not self.deciding_race:
            return None
        ordered = self.deciding_race.faster_first
        return ordered.one, ordered.other


def judge_races(contenders: Contenders, sides: Sides, margin: float) -> Verdict:
    """Returns the verdict by what decides, without regard to what was learned."""
    over_machine = Race.between(contenders, sides.distributed, sides.machines)
    has_both_families = bool(sides.rings and sides.servers)
    if has_both_families:
        main = Race.between(contenders, sides.rings, sides.servers)
    else:
        main = Race.between(contenders, sides.distributed[:1], sides.distributed[1:])
    pays = AHEAD
    if over_machine:
        pays = int(rule.judge_distribution(over_machine.lead, margin))
    if pays == BEHIND:
        return Verdict(ONE_MACHINE_WINS, main, over_machine)
    state = int(rule.judge(main.lead, margin)) if main else None
    undecided = []
    if main and state == OPEN:
        undecided.append(main)
    if over_machine and pays == OPEN:
        # The question whether distribution pays may decide alone.
        if over_machine.lead.mean < math.log1p(margin):
            undecided = []
        undecided.append(over_machine)
    if undecided:
        return Verdict(UNKNOWN, main, over_machine, tuple(undecided))
    return Verdict(_word(sides, main, state, bool(over_machine)), main, over_machine)


def _word(sides: Sides, main: Race | None, state: int | None, has_machine: bool) -> str:
    """Returns the word for races that are decided, if one machine is not the answer.

    Args:
        sides: who is compared.
        main: the race between rings and servers, or within one family.
        state: AHEAD, BEHIND or LEVEL: how the main race ended; None without one.
        has_machine: whether distribution was compared with one machine.
    """
    if not main or state is None:
        return WORD_OF_FAMILY[sides.distributed[0].family] if has_machine else UNKNOWN
    if not (sides.rings and sides.servers):
        return WORD_OF_FAMILY[main.one.family]
    return {AHEAD: RING_WINS, BEHIND: SERVERS_WIN, LEVEL: EITHER}[state]
