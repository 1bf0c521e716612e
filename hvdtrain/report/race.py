"""What the rule says of speeds: the best ring against the best servers, what is distributed against one machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain import modes
from hvdtrain.report import rule
from hvdtrain.report.contenders import Field, Sides
from hvdtrain.report.rule import AHEAD, BEHIND, LEVEL, OPEN, Lead
from hvdtrain.runs.read import Kind

RING, SERVERS, EITHER, ONE_MACHINE, UNKNOWN = "RING", "SERVERS", "EITHER", "ONE MACHINE", "NOT YET KNOWN"
OF_FAMILY = {modes.RING: RING, modes.SERVERS: SERVERS}


@dataclass(frozen=True)
class Race:
    """The best of some against the best of others.

    Attributes:
        lead: of `one` over `other`.
        sizes: how many were compared, of those that `one` and that `other` is the best of: among so many the error of
            the lead's low end is shared, and that of its high end.
    """

    one: Kind
    other: Kind
    lead: Lead
    sizes: tuple[int, int]

    @property
    def turned(self) -> "Race":
        """The same with the faster one first."""
        mean, low, high, deviation, n = self.lead
        if mean >= 0:
            return self
        return Race(self.other, self.one, Lead(-mean, -high, -low, deviation, n), self.sizes[::-1])

    @classmethod
    def between(cls, field: Field, some: Sequence[Kind], others: Sequence[Kind]) -> "Race | None":
        """None without one on each side."""
        if not some or not others:
            return None
        logs = {(a, b): field.log_ratios(a, b) for a in some for b in others}
        means = {pair: rule.at_look(ratios).mean for pair, ratios in logs.items()}
        one = max(some, key=lambda a: min(means[a, b] for b in others))
        other = min(others, key=lambda b: max(means[a, b] for a in some))
        lead = rule.best_over_best([[logs[a, b] for b in others] for a in some])
        return cls(one, other, lead, (len(some), len(others)))


@dataclass(frozen=True)
class Outcome:
    """What the speeds say.

    Attributes:
        main: ring against servers; where there is one of these families alone, its first mode against its others.
        gate: what is distributed against one machine.
        open: which of the two are not decided.
    """

    word: str
    main: Race | None
    gate: Race | None
    open: tuple[Race, ...] = ()

    @property
    def race(self) -> Race | None:
        """What the word is about."""
        return self.gate if self.word == ONE_MACHINE or not self.main else self.main

    @property
    def pair(self) -> tuple[Kind, Kind] | None:
        """The faster of the two that the word is about, and its opponent."""
        return (self.race.turned.one, self.race.turned.other) if self.race else None


def run(field: Field, of: Sides, margin: float) -> Outcome:
    """The word that the speeds alone give."""
    gate = Race.between(field, of.distributed, of.machines)
    two_families = bool(of.rings and of.servers)
    first, rest = (of.rings, of.servers) if two_families else (of.distributed[:1], of.distributed[1:])
    main = Race.between(field, first, rest)
    pays: Any = rule.pays(gate.lead, margin) if gate else AHEAD
    if pays == BEHIND:
        return Outcome(ONE_MACHINE, main, gate)
    state = int(rule.judge(main.lead, margin)) if main else None
    races = tuple(race for race, judged in ((main, state), (gate, pays)) if race and judged == OPEN)
    if gate in races and gate and gate.lead.mean < math.log1p(margin):  # it may decide alone
        races = (gate,)
    if races:
        return Outcome(UNKNOWN, main, gate, races)
    if not main or state is None:
        word = OF_FAMILY[of.distributed[0].family] if gate else UNKNOWN
        return Outcome(word, main, gate)
    if not two_families:
        return Outcome(OF_FAMILY[main.one.family], main, gate)
    return Outcome({AHEAD: RING, BEHIND: SERVERS, LEVEL: EITHER}[state], main, gate)
