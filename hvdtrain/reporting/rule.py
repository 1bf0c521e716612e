"""The statistical rule that answers a comparison, on logarithms of what decides alone.

What decides is the speed, or how soon a target is reached. The rule says how many repeats count at a
look, and what may be concluded from them.

Repeats are looked at after each number in LOOKS. Look k spends ALPHA/(k(k+1)) of the allowed error,
which sums to at most ALPHA over all looks. So looking until something shows is wrong as rarely as
looking once.

The best contender of one side is compared with the best of the other. The lead of the best a over
the best b lies within [max_a min_b low, min_b max_a high], in the spirit of Hsu's comparisons with
the best (1984). The low end is too high only if some a's interval against the truly best b misses
the truth. There are as many such intervals as there are a, so each low end is taken from an
interval at 1 - alpha/(number of a). The same holds for the high ends and b.

A training that does not reach its target has a time that is known from below alone. Then the
difference of a pair is known from one side: it is a bound. A bound counts as if it were the
difference, since that is the least that it can mean, and the end of the interval on its other side
is infinite. So such a side can lose, and it can be neither ahead nor level. A pair in which neither
training reached the target says nothing, and is no pair.

All functions take any number of comparisons at once: arrays whose last axis is repeats.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

LOOKS = (5, 7, 10, 14, 20, 28, 40, 56)
ALPHA = 0.05
# The chance with which `repeats_needed` wants to reach a conclusion.
POWER = 0.8
BEHIND = -1
LEVEL = 0
AHEAD = 1
OPEN = 2


class Differences(NamedTuple):
    """Differences of logarithms between two contenders, of which some may be bounds alone.

    Attributes:
        values: [..., repeats].
        at_least: where the true difference is the value or more: the second contender's training
            did not reach its target. Like `values`, or False for none.
        at_most: where it is the value or less: the first contender's training did not.
    """

    values: Any
    at_least: Any = False
    at_most: Any = False

    def any_of_first(self, n: int) -> tuple[Any, Any]:
        """Returns whether any of the first n repeats is `at_least`, and any `at_most`."""
        import numpy as np

        shape = np.shape(self.values)
        at_least = np.broadcast_to(self.at_least, shape)[..., :n].any(-1)
        at_most = np.broadcast_to(self.at_most, shape)[..., :n].any(-1)
        return at_least, at_most


class Lead(NamedTuple):
    """The logarithm of a ratio of two contenders, estimated from paired repeats.

    All fields but n may be arrays.

    Attributes:
        mean: the mean over repeats.
        low, high: the ends of the confidence interval; infinite with fewer than two repeats, and
            where a difference is only known to be a bound from the other side.
        deviation: the standard deviation of one repeat.
        n: the number of repeats.
    """

    mean: Any
    low: Any
    high: Any
    deviation: Any
    n: int


def last_look(repeats: int) -> tuple[int, float]:
    """Returns how many of the repeats count at the last look, and the error that it may make."""
    number = max(1, sum(look <= repeats for look in LOOKS))
    return min(repeats, LOOKS[number - 1]), _error_of_look(number)


def _error_of_look(number: int) -> float:
    return ALPHA / (number * (number + 1))


def estimate_lead(differences: Differences, size: int = 1) -> Lead:
    """Returns the mean of paired differences with Student's interval, as of the last look.

    Args:
        differences: of the repeats.
        size: among how many intervals the allowed error is divided.
    """
    import numpy as np
    from scipy.special import stdtrit  # scipy.stats takes three times as long to import

    values = np.asarray(differences.values, dtype=float)
    n, alpha = last_look(values.shape[-1])
    if not n:
        return Lead(0.0, -math.inf, math.inf, math.inf, 0)
    values = values[..., :n]
    mean = values.mean(-1)
    deviation = values.std(-1, ddof=1) if n > 1 else np.full(mean.shape, math.inf)
    half = deviation * stdtrit(max(n - 1, 1), 1 - alpha / size / 2) / math.sqrt(n)
    may_be_more, may_be_less = differences.any_of_first(n)
    low = np.where(may_be_less, -math.inf, mean - half)
    high = np.where(may_be_more, math.inf, mean + half)
    return Lead(mean, low, high, deviation, n)


def best_over_best(log_ratios: Sequence[Sequence[Differences]]) -> Lead:
    """Returns the lead of the best contender of one side over the best of the other.

    Args:
        log_ratios: a row for each contender of the first side, a column for each of the second. An
            entry is the logarithms of the two contenders' ratios, in the repeats that both have.
    """
    import numpy as np

    columns = list(zip(*log_ratios, strict=True))
    rows = [[estimate_lead(logs, len(log_ratios)) for logs in row] for row in log_ratios]
    means = [np.min([lead.mean for lead in row], axis=0) for row in rows]
    lows = [np.min([lead.low for lead in row], axis=0) for row in rows]
    highs = []
    for column in columns:
        column_highs = [estimate_lead(logs, len(columns)).high for logs in column]
        highs.append(np.max(column_highs, axis=0))
    leads = list(chain.from_iterable(rows))
    return Lead(
        mean=np.max(means, axis=0),
        low=np.max(lows, axis=0),
        high=np.min(highs, axis=0),
        deviation=np.max([lead.deviation for lead in leads], axis=0),
        n=min(lead.n for lead in leads),
    )


def judge(lead: Lead, margin: float) -> Any:
    """Returns AHEAD, BEHIND, LEVEL or OPEN, for each comparison.

    A lead is AHEAD if the interval excludes 1 and the mean is at least the margin away. A lead is
    LEVEL if the whole interval lies within the margin: two one-sided tests (Schuirmann, 1987).

    Args:
        lead: the lead of one side over the other.
        margin: the smallest difference that matters, as a share: 0.05 is 5 %.
    """
    import numpy as np

    if lead.n < LOOKS[0]:
        return np.full(np.shape(lead.mean), OPEN)
    least = math.log1p(margin)
    is_ahead = (lead.low > 0) & (lead.mean >= least)
    is_behind = (lead.high < 0) & (lead.mean <= -least)
    is_level = (lead.low > -least) & (lead.high < least)
    return np.select([is_ahead, is_behind, is_level], [AHEAD, BEHIND, LEVEL], OPEN)


def judge_distribution(lead: Lead, margin: float) -> Any:
    """Returns whether distribution is faster than one machine by the margin, for each comparison.

    The answer is AHEAD if it is, BEHIND if it is not, else OPEN.

    Args:
        lead: the lead of the best distributed contender over the best machine.
        margin: see judge.
    """
    import numpy as np

    judged = judge(lead, margin)
    is_less = (lead.high < math.log1p(margin)) | (judged == LEVEL) | (judged == BEHIND)
    is_behind = is_less & (lead.n >= LOOKS[0])
    return np.select([judged == AHEAD, is_behind], [AHEAD, BEHIND], OPEN)


def repeats_needed(
    lead: Lead, margin: float, size: int, against_machine: bool = False
) -> int | None:
    """Returns after which look something can be concluded with a chance of POWER.

    Mean and deviation are taken to stay as they are, and so are ends that are infinite: whoever did
    not always reach the target cannot come to be ahead.

    Args:
        lead: the lead so far.
        margin: see judge.
        size: among how many intervals the allowed error is divided.
        against_machine: the question is judge_distribution's, not judge's.

    Returns:
        The number of repeats; None if no look would do.
    """
    from scipy.special import stdtrit

    if lead.n < 2:
        return LOOKS[0]
    least = math.log1p(margin)
    mean = float(lead.mean)
    deviation = max(float(lead.deviation), 1e-9)
    can_be_ahead = lead.low > -math.inf
    can_be_behind = lead.high < math.inf
    can_be_level = can_be_ahead and can_be_behind and not against_machine
    for number, n in enumerate(LOOKS, 1):
        if n <= lead.n:
            continue
        error = deviation / math.sqrt(n)
        half = error * float(stdtrit(n - 1, 1 - _error_of_look(number) / size / 2))
        # A mean beyond `outside` is a lead. A mean within `inside` is level. Between them is open.
        outside = max(least, half)
        inside = least - half
        behind = inside if against_machine else -outside
        chance = 0.0
        if can_be_ahead:
            chance += 1 - _chance_below(outside, mean, error)
        if can_be_behind:
            chance += _chance_below(behind, mean, error)
        if can_be_level and inside > 0:
            chance += _chance_below(inside, mean, error) - _chance_below(-inside, mean, error)
        if chance >= POWER:
            return n
    return None


def _chance_below(edge: float, mean: float, error: float) -> float:
    """Returns how probably an estimate lies below an edge.

    Args:
        edge: the edge.
        mean: the mean of the estimate, which is normally distributed.
        error: its standard deviation.
    """
    from scipy.special import ndtr

    return float(ndtr((edge - mean) / error))


def half_width_of_mean(values: Sequence[float], error: float) -> float:
    """Returns half the width of Student's interval for a mean, which misses it in `error` of cases.

    Args:
        values: two or more.
    """
    import numpy as np
    from scipy.special import stdtrit

    n = len(values)
    return float(np.std(values, ddof=1) * stdtrit(n - 1, 1 - error / 2) / math.sqrt(n))
