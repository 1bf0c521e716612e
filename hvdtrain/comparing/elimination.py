"""The rule by which a search leaves settings out. It looks at speeds alone.

In each round every setting of a side that is left sprints once, in an order that is drawn anew. The
logarithm of a speed is modelled as an effect of the setting, plus an effect of the round, plus an
error. All settings share the error's variance. A table of k settings in r rounds has residuals,
after the means of rows and columns, which estimate that variance with (k - 1)(r - 1) degrees of
freedom. The residuals of both sides' tables are pooled. The difference of two settings' means has
the standard error s·√(2/r), so a setting is shown to be slower than f times another where

    mean(other) + log f - mean(setting) > t · s · √(2/r),

with the one-sided quantile t of Student's distribution. A setting that has m rivals is left out for
any of them, so each rival has 1/m of the error (union bound). The search looks after round ROUNDS,
and again after each later round. Look number l spends ERROR/(l(l + 1)), which is at most ERROR over
all looks. So a setting that is as fast as the fastest of its rivals is left out in at most 5 of 100
searches, however many rivals there are and however long the search lasts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The share of searches in which a setting may be left out that is as fast as the fastest.
ERROR = 0.05
# The fewest rounds before a setting is left out.
ROUNDS = 2
# The fewest degrees of freedom. With fewer settings there are more rounds.
LEAST_FREEDOM = 3
# The ratio of two speeds is computed from a logarithm within these bounds, so that it is a float.
_LARGEST_LOG = 700.0

# The samples/s of each setting, by name, in the same rounds.
Table = Mapping[str, Sequence[float]]


def least_rounds(numbers: Sequence[int]) -> int:
    """Returns after how many rounds the spread is known with LEAST_FREEDOM degrees of freedom.

    Args:
        numbers: the number of settings of each side.
    """
    freedom_per_round = sum(number - 1 for number in numbers if number)
    if not freedom_per_round:
        return ROUNDS
    return max(ROUNDS, 1 + math.ceil(LEAST_FREEDOM / freedom_per_round))


class Spread(NamedTuple):
    """How much the logarithm of a sprint's speed varies.

    Attributes:
        deviation: the standard deviation.
        freedom: the degrees of freedom with which the deviation is known.
    """

    deviation: float
    freedom: int


def pooled_spread(tables: Sequence[Table]) -> Spread:
    """Returns the spread of the residuals of all tables together."""
    squares = 0.0
    freedom = 0
    for table in tables:
        rows = [[math.log(speed) for speed in speeds] for speeds in table.values()]
        if len(rows) < 2 or len(rows[0]) < 2:
            continue
        squares += _squared_residuals(rows)
        freedom += (len(rows) - 1) * (len(rows[0]) - 1)
    deviation = math.sqrt(squares / freedom) if freedom else math.inf
    return Spread(deviation, freedom)


def _squared_residuals(rows: Sequence[Sequence[float]]) -> float:
    """Returns the sum of squares that is left after the means of rows and columns."""
    row_means = [_mean(row) for row in rows]
    column_means = [_mean(column) for column in zip(*rows, strict=True)]
    mean = _mean(row_means)
    squares = 0.0
    for row, row_mean in zip(rows, row_means, strict=True):
        for value, column_mean in zip(row, column_means, strict=True):
            squares += (value - row_mean - column_mean + mean) ** 2
    return squares


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def half_width(spread: Spread, rounds: int, rivals: int) -> float:
    """Returns how far the means of two settings have to be apart for one to be shown slower.

    Args:
        spread: of all sprints.
        rounds: how many rounds both settings sprinted in.
        rivals: how many settings the slower one may be left out for.

    Returns:
        A difference of logarithms; infinite if the spread is not known.
    """
    if not spread.freedom:
        return math.inf
    from scipy.special import stdtrit

    look = max(1, rounds - ROUNDS + 1)
    error = ERROR / (look * (look + 1)) / max(1, rivals)
    quantile = float(stdtrit(spread.freedom, 1 - error))
    return quantile * spread.deviation * math.sqrt(2 / rounds)


class SpeedRatio(NamedTuple):
    """The ratio of a setting's speed to a rival's speed.

    Attributes:
        ratio: the estimate.
        low: the interval's lower end.
        high: the interval's upper end. If it is below f, the setting is shown to be slower than f
            times the rival.
    """

    ratio: float
    low: float
    high: float


def compare_speeds(
    speeds: Sequence[float], rival_speeds: Sequence[float], spread: Spread, rivals: int
) -> SpeedRatio:
    """Returns the ratio of a setting's speed to a rival's.

    Args:
        speeds: samples/s of the setting, a figure a round.
        rival_speeds: samples/s of the rival in the same rounds.
        spread: of all sprints.
        rivals: how many settings this one may be left out for.
    """
    pairs = zip(speeds, rival_speeds, strict=True)
    logs = [math.log(speed / rival_speed) for speed, rival_speed in pairs]
    mean = _mean(logs)
    half = min(half_width(spread, len(logs), rivals), _LARGEST_LOG - abs(mean))
    return SpeedRatio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
