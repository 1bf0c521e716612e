"""The search for the learning rate of each mathematics, before times to the target are compared.

One rate for all is unfair to whoever learns best at another. So each mathematics (all modes in
lockstep have one) is trained at the same number of rates around the given one, in the same number
of trainings of the same length, with seeds that the comparison does not use. Successive halving:
after a training of each, the better half is trained once more with another seed, and so on.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from hvdtrain.comparing.comparison_state import ComparisonState
from hvdtrain.comparing.grid import LARGEST_SEED, Planned
from hvdtrain.comparing.selection import FIRST, steps_of
from hvdtrain.reporting.conduct import FoundRate, TriedRate
from hvdtrain.reporting.target import Reach, reach_of
from hvdtrain.runs.read import Run, grouped

# The rates that are tried, as multiples of the given one. Of equally good ones the first stays.
FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
# How many rates are left in each round.
ROUNDS = (5, 3, 2)
TRAININGS = sum(ROUNDS)
# Seeds of the search begin so far after the comparison's first one.
SEEDS_AFTER = 1000
# Does a training at the rate of its configuration. Returns None if it failed.
Train = Callable[[Planned], Run | None]


@dataclass
class _Candidate:
    """A rate, and what its trainings have come to."""

    lr: float
    reaches: list[Reach] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def rank(self) -> tuple[float, ...]:
        """The place among rates, as a key to sort by: the best is first.

        The fewest trainings without the target count first, then the fewest samples to it. Samples
        tell it better than seconds, since the steps of one contender take equally long.
        """
        missed = self.failed + sum(not reach.is_reached for reach in self.reaches)
        samples = [reach.samples for reach in self.reaches]
        accuracy = fmean(self.accuracies) if self.accuracies else 0.0
        return missed, fmean(samples) if samples else math.inf, -accuracy

    def note(self, run: Run | None) -> None:
        """Notes what a training has come to; None if it failed."""
        reach = reach_of(run) if run else None
        if not run or not reach:
            self.failed += 1
            return
        self.reaches.append(reach)
        self.accuracies.append(run.summary.val_accuracy or 0.0)


def groups(contenders: Sequence[Planned]) -> list[list[Planned]]:
    """Returns the contenders of each mathematics, of each task. The first of them is trained."""
    return [
        sorted(alike, key=lambda run: FIRST.index(run.family))
        for alike in grouped(contenders, _mathematics_of_task).values()
    ]


def _mathematics_of_task(run: Planned) -> Hashable:
    return run.where, steps_of(run)


def trials_of(group: Sequence[Planned]) -> list[Planned]:
    """Returns trainings of a mathematics, as many as there will be. Which rates stay is not known.

    They are those of a search in which none comes to anything.
    """
    trials: list[Planned] = []
    _search(group, trials.append)
    return trials


def _trial(run: Planned, lr: float, number: int) -> Planned:
    """Returns a training of the search.

    Args:
        run: the contender that is trained.
        lr: the learning rate.
        number: of the round, from 1. Each has another seed.
    """
    seed = (run.config.seed + SEEDS_AFTER + number) % (LARGEST_SEED + 1)
    return run.with_options(lr=lr, repeat=number, seed=seed)


def with_found_rates(contenders: Sequence[Planned], state: ComparisonState) -> list[Planned]:
    """Returns the contenders at the rates that were found; as they are where none was yet."""
    at_rates = []
    for run in contenders:
        found = state.found_rate(run)
        if found:
            run = run.with_options(
                lr=found.found, lr_around=found.around, lr_trainings=found.trainings
            )
        at_rates.append(run)
    return at_rates


def find_rates(
    contenders: Sequence[Planned], state: ComparisonState, train: Train
) -> list[FoundRate]:
    """Finds the rate of each mathematics that has none yet, and notes it in the state.

    Args:
        contenders: the contenders that are repeated, at the given rate.
        state: of the comparison.
        train: does a training.

    Returns:
        What was found.
    """
    found = []
    for group in groups(contenders):
        known = next(filter(None, map(state.found_rate, group)), None)
        if known:
            # A contender that was added later, with the same mathematics.
            state.share_rate(known, [run.contender for run in group])
            continue
        rate = _search(group, train)
        state.note_rate(rate)
        found.append(rate)
    return found


def _search(group: Sequence[Planned], train: Train) -> FoundRate:
    """Returns the rate at which the contenders of a group come to the target soonest."""
    run = group[0]
    every = [_Candidate(run.config.lr * factor) for factor in FACTORS]
    left = every
    seconds = 0.0
    for number, kept in enumerate(ROUNDS, 1):
        left = sorted(left, key=lambda candidate: candidate.rank)[:kept]
        for candidate in left:
            trained = train(_trial(run, candidate.lr, number))
            candidate.note(trained)
            seconds += (trained.summary.wall_s or 0.0) if trained else 0.0
    best = min(left, key=lambda candidate: candidate.rank)
    return FoundRate(
        of=[member.contender for member in group],
        trained=run.contender,
        around=run.config.lr,
        found=best.lr,
        trainings=TRAININGS,
        seconds=seconds,
        tried=[_told(candidate) for candidate in every],
    )


def _told(candidate: _Candidate) -> TriedRate:
    samples = [reach.samples for reach in candidate.reaches if reach.is_reached]
    return TriedRate(
        lr=candidate.lr,
        trainings=len(candidate.reaches) + candidate.failed,
        reached=len(samples),
        samples=fmean(samples) if samples else None,
        accuracy=fmean(candidate.accuracies) if candidate.accuracies else None,
    )
