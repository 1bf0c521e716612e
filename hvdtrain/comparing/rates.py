"""The search for the learning rate of each mathematics, before times to the target are compared.

Contenders have the same *mathematics* if their steps compute the same, as those of all lockstep
modes do. Each mathematics gets its own learning rate, since one rate for all would favour some. Each
is trained at the same number of rates around the given one, in the same number of trainings of the
same length, with seeds that the comparison does not use. Successive halving: after a training of
each rate, the better half is trained once more with another seed, and so on.

At the best rate, equally many other settings are tried for each mathematics, in the same way:
warm-up; for asynchronous modes how a push counts and how far a worker may be ahead. If there are
too few of these, finer rates are tried.
"""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.comparing.comparison_state import ComparisonState
from hvdtrain.comparing.grid import LARGEST_SEED, Planned
from hvdtrain.comparing.selection import steps_of
from hvdtrain.reporting.conduct import FoundRate, TriedRate, settings_in_words
from hvdtrain.reporting.target import Reach, reach_of
from hvdtrain.runs.read import Run, grouped

# The families in the order in which one of them is trained for all that compute the same steps.
FIRST = (modes.RING, modes.SERVERS, modes.ONE_MACHINE)
# The rates that are tried, as multiples of the given one. Of equally good ones the first stays.
FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
# How many rates are left in each round.
ROUNDS = (5, 3, 2)
# How many other settings are tried at the best rate, and are left in each round.
VARIANTS = 3
VARIANT_ROUNDS = (VARIANTS, 2, 1)
TRAININGS = sum(ROUNDS) + sum(VARIANT_ROUNDS)
# The part of a training in which the rate rises where warming up is tried.
WARM_UP = 0.1
# How far finer rates are from the best of FACTORS.
FINER = 2**0.5
# Other remedies for staleness, which not every way to count a push can have.
_REMEDIES = ("look_ahead", "delay_compensation", "staleness_lr", "local_steps")
# Seeds of the search begin so far after the comparison's first one.
SEEDS_AFTER = 1000
# Does a training, whose folder is named so. Returns None if it failed.
Train = Callable[[Planned, str], Run | None]


@dataclass
class _Candidate:
    """A rate with other settings, by option, and what its trainings have come to."""

    lr: float
    settings: Mapping[str, Any] = field(default_factory=dict)
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
        sorted(alike, key=lambda run: (FIRST.index(run.family), run.config.slow != "none"))
        for alike in grouped(contenders, _mathematics_of_task).values()
    ]


def _mathematics_of_task(run: Planned) -> Hashable:
    """Returns a key of the task and of what its steps compute.

    In lockstep a slow worker changes no step, unless --backup drops its pushes.
    """
    is_lockstep = modes.declared(run.config.mode).lockstep and not run.config.backup
    slow = "" if is_lockstep else run.config.slow
    return run.config.model, slow, steps_of(run)


def trials_of(group: Sequence[Planned]) -> list[Planned]:
    """Returns trainings of a mathematics, as many as there will be. Which rates stay is not known."""
    run = group[0]
    trials = []
    for number, kept in enumerate(ROUNDS, 1):
        rates = [_Candidate(run.config.lr * factor) for factor in FACTORS[:kept]]
        trials += [_trial(run, candidate, number) for candidate in rates]
    for number, kept in enumerate(VARIANT_ROUNDS, 1):
        trials += [_trial(run, _Candidate(run.config.lr), number)] * kept
    return trials


def _trial(run: Planned, candidate: _Candidate, number: int) -> Planned:
    """Returns a training of the search.

    Args:
        run: the contender that is trained.
        candidate: the rate and settings.
        number: of the round, from 1. Each has another seed.
    """
    seed = (run.config.seed + SEEDS_AFTER + number) % (LARGEST_SEED + 1)
    return run.with_options(lr=candidate.lr, repeat=number, seed=seed, **candidate.settings)


def variants_of(
    run: Planned, lr: float, samples: int, given: Collection[str]
) -> list[tuple[float, dict[str, Any]]]:
    """Returns VARIANTS other settings of a mathematics: rates, each with options.

    Args:
        run: the contender that is trained.
        lr: the best rate.
        samples: the number of training images.
        given: options on the command line, which are not varied.
    """
    config = run.config
    variants: list[tuple[float, dict[str, Any]]] = []
    for name, values in _of_asynchronous_modes(config).items():
        if name not in given:
            variants += [(lr, {name: value}) for value in values]
    del variants[VARIANTS - 1 :]
    steps = config.total_steps(samples)
    if steps and "warmup" not in given:
        variants.append((lr, {"warmup": max(1, int(steps * WARM_UP))}))
    variants += [(lr * FINER, {}), (lr / FINER, {}), (lr * FINER**0.5, {})]
    return variants[:VARIANTS]


def _of_asynchronous_modes(config: RunConfig) -> dict[str, list[Any]]:
    """Returns the values that are tried of options that lockstep modes do not have."""
    options = modes.declared(config.mode).options
    values: dict[str, list[Any]] = {}
    if "staleness" in options:
        values["staleness"] = [2 * config.staleness or 1]
    has_remedy = any(getattr(config, name) != getattr(RunConfig, name) for name in _REMEDIES)
    if "push_scale" in options and not has_remedy:
        scales = ("none", "mean", "softsync")
        values["push_scale"] = [scale for scale in scales if scale != config.push_scale]
    return values


def with_found_rates(contenders: Sequence[Planned], state: ComparisonState) -> list[Planned]:
    """Returns the contenders at the rates that were found; as they are where none was yet."""
    at_rates = []
    for run in contenders:
        found = state.found_rate(run)
        if found:
            run = run.with_options(
                lr=found.found,
                lr_around=found.around,
                lr_trainings=found.trainings,
                looked_for=",".join(found.looked_for),
                **found.settings,
            )
        at_rates.append(run)
    return at_rates


def find_rates(
    contenders: Sequence[Planned],
    state: ComparisonState,
    train: Train,
    given: Collection[str] = (),
) -> list[FoundRate]:
    """Finds the rate of each mathematics that has none yet, and notes it in the state.

    Args:
        contenders: the contenders that are repeated, at the given rate.
        state: of the comparison.
        train: does a training.
        given: options on the command line, which are not varied.

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
        rate = _search(group, train, state.samples, given)
        state.note_rate(rate)
        found.append(rate)
    return found


def _search(
    group: Sequence[Planned], train: Train, samples: int, given: Collection[str]
) -> FoundRate:
    """Returns the rate and settings at which the contenders of a group reach the target soonest."""
    run = group[0]
    search = _Halving(run, train)
    rates = [_Candidate(run.config.lr * factor) for factor in FACTORS]
    best_rate = search.best_of(rates, ROUNDS)
    others = variants_of(run, best_rate.lr, samples, given)
    variants = [_Candidate(lr, settings) for lr, settings in others]
    best_variant = search.best_of(variants, VARIANT_ROUNDS)
    # Both have been trained with the same seeds. Of equally good ones the simpler stays.
    best = min(best_rate, best_variant, key=lambda candidate: candidate.rank)
    names = dict.fromkeys(name for candidate in variants for name in candidate.settings)
    return FoundRate(
        of=[member.contender for member in group],
        trained=run.contender,
        around=run.config.lr,
        found=best.lr,
        trainings=TRAININGS,
        seconds=search.seconds,
        tried=[_told(candidate) for candidate in (*rates, *variants)],
        settings=dict(best.settings),
        looked_for=list(names),
    )


class _Halving:
    """Trainings of one contender by successive halving.

    Args:
        run: the contender.
        train: does a training.

    Attributes:
        seconds: how long the trainings took, added up.
    """

    def __init__(self, run: Planned, train: Train) -> None:
        self.run = run
        self.train = train
        self.seconds = 0.0

    def best_of(self, candidates: Sequence[_Candidate], rounds: Sequence[int]) -> _Candidate:
        """Trains the candidates, of which so many are left in each round; returns the best."""
        left = list(candidates)
        for number, kept in enumerate(rounds, 1):
            left = sorted(left, key=lambda candidate: candidate.rank)[:kept]
            for candidate in left:
                trained = self.train(_trial(self.run, candidate, number), _name_of(candidate))
                candidate.note(trained)
                self.seconds += (trained.summary.wall_s or 0.0) if trained else 0.0
        return min(left, key=lambda candidate: candidate.rank)


def _name_of(candidate: _Candidate) -> str:
    """Returns what names the folders of a candidate's trainings: `lr0.0003-warmup8`."""
    words = [f"{name}{value}" for name, value in candidate.settings.items()]
    return "-".join([f"lr{candidate.lr:.6g}", *words])


def _told(candidate: _Candidate) -> TriedRate:
    samples = [reach.samples for reach in candidate.reaches if reach.is_reached]
    return TriedRate(
        lr=candidate.lr,
        trainings=len(candidate.reaches) + candidate.failed,
        reached=len(samples),
        samples=fmean(samples) if samples else None,
        accuracy=fmean(candidate.accuracies) if candidate.accuracies else None,
        settings=settings_in_words(candidate.settings),
    )
