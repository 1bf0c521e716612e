"""How a comparison was conducted: what its runs alone do not tell."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from hvdtrain.base.config.run_config import flag

# Names of the measures that may decide, the default first.
BY_SPEED = "speed"
BY_TIME_TO_TARGET = "time-to-target"


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


class TriedRate(Struct, frozen=True):
    """A learning rate that was tried before the comparison.

    Attributes:
        lr: the rate.
        trainings: how often it was trained.
        reached: how many of the trainings reached the target.
        samples: the mean samples to the target of those that reached it; None if none did.
        accuracy: the mean validation accuracy in the end; None if all failed.
        settings: what was set beside it, as `--warmup 8`.
    """

    lr: float
    trainings: int
    reached: int
    samples: float | None = None
    accuracy: float | None = None
    settings: str = ""


def settings_in_words(settings: Mapping[str, bool | float | str]) -> str:
    """Returns options as a command line has them: `--warmup 8`."""
    return " ".join(f"{flag(name)} {value}" for name, value in settings.items())


class FoundRate(Struct, frozen=True):
    """The learning rate that was found for all contenders of one mathematics.

    Attributes:
        of: the contenders.
        trained: the contender that was trained at all rates.
        around: the rate that was given.
        found: the rate that was found.
        trainings: how many trainings were spent, of all rates together.
        seconds: how long they trained.
        tried: each rate.
        settings: what was found beside the rate, by option.
        looked_for: the options that were looked for beside the rate.
    """

    of: Sequence[str]
    trained: str
    around: float
    found: float
    trainings: int
    seconds: float
    tried: Sequence[TriedRate] = ()
    settings: Mapping[str, bool | int | float | str] = {}
    looked_for: Sequence[str] = ()

    @property
    def words(self) -> str:
        """The rate and what was found beside it: `0.0006 with --warmup 8`."""
        beside = settings_in_words(self.settings)
        return f"{self.found:g} with {beside}" if beside else f"{self.found:g}"

    @property
    def is_at_edge(self) -> bool:
        """Whether it is the least or the largest rate that was tried."""
        rates = [tried.lr for tried in self.tried]
        return bool(rates) and self.found in (min(rates), max(rates))


class Conduct(Struct, frozen=True):
    """What was done beside the runs that count.

    Attributes:
        left_out: contenders that the search left out.
        disturbed: how many sprints were set aside, because their hosts did other work meanwhile,
            and run again.
        tried: how each side was tried, by family.
        rates: the learning rates that were found, one of each mathematics.
        decided_by: the name of the measure that decides: see measures.MEASURES.
        threads: --threads, if it was given; else 0.
        given: the options that say what is compared, as ComparisonState has them. None if they are
            not known.
    """

    left_out: Sequence[LeftOut] = ()
    disturbed: int = 0
    tried: Mapping[str, Tried] = {}
    rates: Sequence[FoundRate] = ()
    decided_by: str = BY_SPEED
    threads: int = 0
    given: Mapping[str, str] | None = None
