"""What decides a comparison: how fast contenders are, or how soon they reach the target accuracy.

A measure gives each run a rate, of which more is better: samples a second, or targets a second. All
that compares contenders works on the logarithms of such rates.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdtrain.reporting import conduct
from hvdtrain.reporting.rule import Differences
from hvdtrain.reporting.target import Reach, reach_of
from hvdtrain.runs.read import Run


class Rate(NamedTuple):
    """What a run has achieved, by the measure that decides.

    Attributes:
        per_s: samples a second, or 1 over the seconds to the target.
        is_at_most: whether the true rate may be less: the training ended without its target.
    """

    per_s: float
    is_at_most: bool = False


@dataclass(frozen=True)
class Measure:
    """What decides a comparison.

    Attributes:
        name: as --decide-by and verdict.json have it.
        what: what is compared, in words.
        counted: returns the runs of a kind that tell the rate.
        rate: returns the rate of a run; None if the run does not tell it.
    """

    name: str
    what: str
    counted: Callable[[Sequence[Run]], list[Run]]
    rate: Callable[[Run], Rate | None]


def only_trainings(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs without sprints."""
    return [run for run in runs if not run.manifest.sprint]


def speed_runs(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs that tell the speed of a kind: its sprints, or all runs if it has none."""
    sprints = [run for run in runs if run.manifest.sprint]
    return sprints or list(runs)


def reaches_by_repeat(runs: Sequence[Run]) -> dict[int, Reach]:
    """Returns when each training reached its target, or ended without it, by repeat."""
    reaches = {}
    for run in only_trainings(runs):
        reach = reach_of(run)
        if reach:
            reaches[run.manifest.repeat] = reach
    return reaches


def _rate_of_samples(run: Run) -> Rate | None:
    speed = run.summary.samples_per_s
    return Rate(speed) if speed else None


def _rate_to_target(run: Run) -> Rate | None:
    reach = reach_of(run)
    if not reach or not reach.seconds:
        return None
    return Rate(1 / reach.seconds, is_at_most=not reach.is_reached)


SPEED = Measure(conduct.BY_SPEED, "samples/s", speed_runs, _rate_of_samples)
TIME_TO_TARGET = Measure(
    conduct.BY_TIME_TO_TARGET, "times to the target", only_trainings, _rate_to_target
)
# The share of pairs of which one training has to reach the target. With fewer, the side whose
# trainings vary more would seem to be ahead, since its quickest ones are what is left.
LEAST_TOLD = 0.75
MEASURES = {measure.name: measure for measure in (SPEED, TIME_TO_TARGET)}


def differences(pairs: Iterable[tuple[Rate, Rate]]) -> Differences:
    """Returns the logarithms of the ratios of two contenders' rates.

    A pair of two bounds says nothing and is left out. Those that are left then have short times by
    selection. If they are fewer than LEAST_TOLD of all, each of them is a bound in both directions,
    from which nothing follows.

    Args:
        pairs: the rates of both in each repeat that both have.
    """
    values = []
    at_least = []
    at_most = []
    silent = 0
    for rate, other_rate in pairs:
        if rate.is_at_most and other_rate.is_at_most:
            silent += 1
            continue
        values.append(math.log(rate.per_s / other_rate.per_s))
        at_least.append(other_rate.is_at_most)
        at_most.append(rate.is_at_most)
    if len(values) < LEAST_TOLD * (len(values) + silent):
        at_least = at_most = [True] * len(values)
    return Differences(values, at_least, at_most)
