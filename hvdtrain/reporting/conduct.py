"""How a comparison was conducted: what its runs alone do not tell."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

# Names of the measures that may decide, the default first.
SPEED = "speed"
TIME_TO_TARGET = "time-to-target"


class LeftOut(Struct, frozen=True):
    """A contender that was tried and not repeated.

    Attributes:
        run: the contender's name.
        why: the rule that left it out, with the figures.
    """

    run: str
    why: str


class Tried(Struct, frozen=True):
    """How a side was tried before the comparison.

    Attributes:
        settings: how many settings sprinted.
        seconds: the time that their sprints measured, added up.
    """

    settings: int
    seconds: float


class Conduct(Struct, frozen=True):
    """What was done beside the runs that count.

    Attributes:
        left_out: contenders that the search left out.
        disturbed: how many sprints were set aside, because their hosts did other work meanwhile,
            and run again.
        tried: how each side was tried, by family.
        decided_by: the name of the measure that decides: see measures.MEASURES.
    """

    left_out: Sequence[LeftOut] = ()
    disturbed: int = 0
    tried: Mapping[str, Tried] = {}
    decided_by: str = SPEED
