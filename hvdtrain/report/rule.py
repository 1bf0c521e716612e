"""The rule by which a comparison is answered, on logarithms of speeds alone: who may look when, and what is then said.

Repeats are looked at after LOOKS. Look k spends ALPHA/(k(k+1)) of the error that is allowed, which over all looks is at
most ALPHA: whoever goes on until something shows is wrong as rarely as who looks once. Best is compared with best: the
lead of the best a over the best b lies within [max_a min_b low, min_b max_a high], in the spirit of Hsu's comparisons
with the best (1984). Its low end is too high only if for some a the pair of a and the truly best b is missed: these are
as many as there are a, so each low end is that of an interval at 1 - alpha/(number of a). Likewise the high ends and b.

All functions take any number of comparisons at once: arrays whose last axis is repeats.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

LOOKS = (5, 7, 10, 14, 20, 28, 40, 56)
ALPHA = 0.05
POWER = 0.8  # with how much of it `repeats_needed` finds a word
BEHIND, LEVEL, AHEAD, OPEN = -1, 0, 1, 2


class Lead(NamedTuple):
    """The logarithm of a ratio of speeds: the mean of paired repeats, its interval, the deviation of one repeat.

    All but n, the number of repeats, may be arrays; without two repeats the interval is infinite.
    """

    mean: Any
    low: Any
    high: Any
    deviation: Any
    n: int


def look_at(repeats: int) -> tuple[int, float]:
    """How many of the repeats count, and the error that looking at them may make."""
    number = max(1, sum(look <= repeats for look in LOOKS))
    return min(repeats, LOOKS[number - 1]), ALPHA / (number * (number + 1))


def at_look(differences: Any, size: int = 1) -> Lead:
    """What the last look at these repeats says: the mean of paired differences [..., n] with Student's interval.

    Args:
        size: of how many pairs the error that may be made is shared.
    """
    import numpy as np
    from scipy.special import stdtrit  # scipy.stats takes three times as long to import

    values = np.asarray(differences, dtype=float)
    n, alpha = look_at(values.shape[-1])
    if not n:
        return Lead(0.0, -math.inf, math.inf, math.inf, 0)
    values = values[..., :n]
    mean = values.mean(-1)
    deviation = values.std(-1, ddof=1) if n > 1 else np.full(mean.shape, math.inf)
    half = deviation * stdtrit(max(n - 1, 1), 1 - alpha / size / 2) / math.sqrt(n)
    return Lead(mean, mean - half, mean + half, deviation, n)


def best_over_best(pairs: Sequence[Sequence[Any]]) -> Lead:
    """The lead of the best of some over the best of others.

    Args:
        pairs: of each with each of the others, the logarithms of their ratios in the repeats that both have, of which
            those count that the last look takes.
    """
    import numpy as np

    each = [[at_look(logs, len(pairs)) for logs in row] for row in pairs]
    mean, low = (
        np.max([np.min([getattr(pair, field) for pair in row], axis=0) for row in each], axis=0)
        for field in ("mean", "low")
    )
    highs = [[at_look(logs, len(pairs[0])).high for logs in column] for column in zip(*pairs, strict=True)]
    high = np.min([np.max(column, axis=0) for column in highs], axis=0)
    deviation = np.max([pair.deviation for row in each for pair in row], axis=0)
    return Lead(mean, low, high, deviation, min(pair.n for row in each for pair in row))


def judge(lead: Lead, margin: float) -> Any:
    """AHEAD, BEHIND, LEVEL or OPEN, for each comparison.

    Ahead: the interval excludes 1, and its middle is at least the margin away. Level: it lies within the margin, or is
    no wider than that and has its middle there: a lead too small to matter.

    Args:
        margin: of a ratio, as a share.
    """
    import numpy as np

    least = math.log1p(margin)
    within = (lead.low > -least) & (lead.high < least)
    narrow = (lead.high - lead.low <= least) & (np.abs(lead.mean) < least)
    judged = [(lead.low > 0) & (lead.mean >= least), (lead.high < 0) & (lead.mean <= -least), within | narrow]
    return np.select(judged, [AHEAD, BEHIND, LEVEL], OPEN) if lead.n >= LOOKS[0] else np.full(np.shape(lead.mean), OPEN)


def pays(lead: Lead, margin: float) -> Any:
    """AHEAD where distribution is faster than one machine by the margin, BEHIND where it is not, or OPEN.

    Args:
        lead: of the best that is distributed over the best machine.
    """
    import numpy as np

    judged = judge(lead, margin)
    is_less = (lead.high < math.log1p(margin)) | (judged == LEVEL) | (judged == BEHIND)
    return np.select([judged == AHEAD, is_less & (lead.n >= LOOKS[0])], [AHEAD, BEHIND], OPEN)


def repeats_needed(lead: Lead, margin: float, pairs: int, against_one: bool = False) -> int | None:
    """After which look there is a word with a chance of POWER, were mean and deviation as they are; None after none.

    Args:
        pairs: by how many each pair's error is divided.
        against_one: the question is `pays`.
    """
    from scipy.special import ndtr, stdtrit

    if lead.n < 2:
        return LOOKS[0]
    least, mean, deviation = math.log1p(margin), float(lead.mean), max(float(lead.deviation), 1e-9)
    for number, n in enumerate(LOOKS, 1):
        error = deviation / math.sqrt(n)
        half = error * float(stdtrit(n - 1, 1 - ALPHA / (number * (number + 1)) / pairs / 2))
        outside = max(
            least, half
        )  # a mean beyond it is a lead, one within `inside` is level; what lies between is open
        inside = least if 2 * half <= least else min(least - half, outside)
        edges = [outside, inside] if against_one else [outside, max(inside, 0.0), -max(inside, 0.0), -outside]
        below = [ndtr((edge - mean) / error) for edge in edges]
        if n > lead.n and 1 - sum(below[::2]) + sum(below[1::2]) >= POWER:
            return n
    return None
