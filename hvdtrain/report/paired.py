"""Differences between paired repeats, with their intervals: what a verdict may rest on.

Runs of the same repeat share the seed, and with it initial weights and the order of samples, and ran at about the same
time; so two kinds of runs are compared repeat by repeat. Speeds are compared by the logarithms of their ratios, whose
mean is that of the geometric mean of the ratios.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvdtrain.runs.read import Run

LEAST_REPEATS = 5  # a winner needs so many
MOST_REPEATS = 1000  # so many are looked at to say how many would settle a question
CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """The mean of n paired differences, its confidence interval, their standard deviation. No interval at n < 2.

    Of several comparisons at once, all but n are arrays.
    """

    mean: Any
    low: Any
    high: Any
    deviation: Any
    n: int


def estimate(differences: Any, confidence: float = CONFIDENCE) -> Estimate:
    """The mean of paired differences, with the interval of Student's t.

    Args:
        differences: [..., n], one for each repeat; axes before the last are comparisons.
    """
    import numpy as np

    values = np.asarray(differences, dtype=float)
    n = values.shape[-1]
    mean = values.mean(-1)
    deviation = values.std(-1, ddof=1) if n > 1 else np.full(mean.shape, math.inf)
    half = _half_width(deviation, n, confidence)
    return Estimate(mean, mean - half, mean + half, deviation, n)


def _half_width(deviation: Any, n: Any, confidence: float) -> Any:
    import numpy as np
    from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats takes three times as long to import

    return deviation * stdtrit(np.maximum(n - 1, 1), (1 + confidence) / 2) / np.sqrt(n)


def leads(found: Estimate, margin: float) -> Any:
    """Whether the first of a pair won, from the logarithms of ratios: a bool for each comparison.

    It takes LEAST_REPEATS, an interval of the ratio that is above 1, and a ratio of at least 1 + margin.
    """
    return (found.n >= LEAST_REPEATS) & (found.low > 0) & (found.mean >= math.log1p(margin))


def is_level(found: Estimate, margin: float) -> Any:
    """Whether no difference of the margin is left: it takes LEAST_REPEATS, and the whole interval within it."""
    most = math.log1p(margin)
    return (found.n >= LEAST_REPEATS) & (found.low > -most) & (found.high < most)


def repeats_needed(found: Estimate, threshold: float, confidence: float = CONFIDENCE) -> int | None:
    """How many repeats would part the interval from the threshold, if mean and deviation stayed as they are.

    LEAST_REPEATS at least, also where one repeat shows no deviation yet; None where it takes over MOST_REPEATS.
    """
    import numpy as np

    if found.n < 2:
        return LEAST_REPEATS
    repeats = np.arange(LEAST_REPEATS, MOST_REPEATS + 1)
    enough = _half_width(found.deviation, repeats, confidence) < abs(found.mean - threshold)
    return int(repeats[enough.argmax()]) if enough.any() else None


def pairs(
    runs: Sequence[Run], others: Sequence[Run], figure: Callable[[Run], float | None]
) -> list[tuple[float, float]]:
    """The figure in each repeat that both have."""
    first, second = _by_repeat(runs, figure), _by_repeat(others, figure)
    return [(first[repeat], second[repeat]) for repeat in sorted(first.keys() & second.keys())]


def log_ratios(runs: Sequence[Run], others: Sequence[Run], figure: Callable[[Run], float | None]) -> list[float]:
    """The logarithm of the ratio of a positive figure, in each repeat that both have."""
    return [math.log(a) - math.log(b) for a, b in pairs(runs, others, lambda run: figure(run) or None)]


def _by_repeat(runs: Sequence[Run], figure: Callable[[Run], float | None]) -> dict[int, float]:
    """The figure of each repeat that has it; the mean where a repeat was run several times."""
    found: dict[int, list[float]] = {}
    for run in runs:
        if (value := figure(run)) is not None:
            found.setdefault(run.repeat, []).append(value)
    return {repeat: sum(values) / len(values) for repeat, values in found.items()}
