"""Histograms of step durations, which add up over workers and starts, and their percentiles."""

import math

PER_OCTAVE = 16  # bins, each 4.4 % wide
SHORTEST_S = 2**-14
BINS = 24 * PER_OCTAVE  # up to 1,024 s


def bin_of(seconds: float) -> int:
    """Returns the bin of a duration. The first and the last hold all that is shorter or longer."""
    octaves = math.log2(max(seconds, SHORTEST_S) / SHORTEST_S)
    return min(int(octaves * PER_OCTAVE), BINS - 1)


def percentile(counts: list[int], share: float) -> float | None:
    """Returns the duration that a share of all durations does not exceed, to about 2 %.

    Args:
        counts: the number of durations in each bin.
        share: from 0 to 1.

    Returns:
        Seconds; None if there are no durations.
    """
    remaining = share * sum(counts)
    for number, count in enumerate(counts):
        if count and count >= remaining:
            fraction = remaining / count  # durations are taken to lie evenly in their bin
            return SHORTEST_S * 2 ** ((number + fraction) / PER_OCTAVE)
        remaining -= count
    return None
