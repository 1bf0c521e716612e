"""How long steps took, as counts that add up over workers and starts: their percentiles without their list."""

import math

PER_OCTAVE = 16  # bins, each 4.4 % wide
SHORTEST_S = 2**-14
BINS = 24 * PER_OCTAVE  # up to 1,024 s


def bin_of(seconds: float) -> int:
    """The bin of a duration; the first and the last hold all that is shorter or longer."""
    return min(max(int(math.log2(max(seconds, SHORTEST_S) / SHORTEST_S) * PER_OCTAVE), 0), BINS - 1)


def percentile(counts: list[int], share: float) -> float | None:
    """Seconds that this share of the durations does not exceed, to about 2 %; None where there are none.

    Args:
        counts: durations in each bin.
        share: from 0 to 1.
    """
    left = share * sum(counts)
    for number, count in enumerate(counts):
        if count and count >= left:
            within = left / count  # as if they lay evenly in their bin
            return SHORTEST_S * 2 ** ((number + within) / PER_OCTAVE)
        left -= count
    return None
