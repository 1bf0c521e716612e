"""Percentiles of durations from counts that add up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.numerics.durations import BINS, SHORTEST_S, bin_of, percentile


def counted(durations):
    counts = [0] * BINS
    for seconds in durations:
        counts[bin_of(seconds)] += 1
    return counts


@given(st.lists(st.floats(SHORTEST_S, 1000), min_size=1), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_is_that_of_the_durations_themselves_to_a_bin(durations, share):
    ordered = sorted(durations)
    exact = ordered[math.ceil(share * len(ordered)) - 1]
    assert percentile(counted(durations), share) == pytest.approx(exact, rel=2 ** (1 / 16) - 1)


def test_the_longest_and_the_shortest_are_counted_too_and_of_none_there_is_no_percentile():
    assert sum(counted([0.0, 1e-9, 1e9])) == 3
    assert percentile([0] * BINS, 0.5) is None
