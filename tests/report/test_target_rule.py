"""How often the rule is right about times to the target: made-up comparisons, a thousand of each sort."""

import math

import numpy as np
import pytest

from hvdtrain.reporting.measures import Rate, differences
from hvdtrain.reporting.rule import (
    AHEAD,
    BEHIND,
    LEVEL,
    LOOKS,
    OPEN,
    Differences,
    estimate_lead,
    judge,
)

MARGIN = 0.05
EVER = math.inf
COMPARISONS, REPEATS = 1000, LOOKS[-1]


def times(seed, step_s, samples, spread, budget=EVER):
    """Seconds to the target of a contender, [1000, 56], and whether it was reached.

    Args:
        step_s: seconds a sample; 2 % of spread.
        samples: to the target.
        spread: of the samples to the target, from seed to seed.
        budget: of samples.
    """
    chance = np.random.default_rng(seed)
    shape = (COMPARISONS, REPEATS)
    needed = samples * np.exp(chance.normal(0, spread, shape))
    s_per_sample = step_s * np.exp(chance.normal(0, 0.02, shape))
    return s_per_sample * np.minimum(needed, budget), needed <= budget


def paired(one, other):
    """The differences of all comparisons, those of pairs first that say something, and how many do."""
    (seconds, reached), (other_seconds, other_reached) = one, other
    order = np.argsort(~(reached | other_reached), axis=1, kind="stable")
    values, own, others = (
        np.take_along_axis(array, order, 1)
        for array in (np.log(other_seconds / seconds), reached, other_reached)
    )
    return Differences(values, at_least=own & ~others, at_most=others & ~own), (own | others).sum(1)


def first_word(one, other):
    """What each comparison ends with that is looked at until it says something."""
    (values, at_least, at_most), pairs = paired(one, other)
    word = np.full(COMPARISONS, OPEN)
    for look in LOOKS:
        lead = estimate_lead(Differences(values[:, :look], at_least[:, :look], at_most[:, :look]))
        is_open = (word == OPEN) & (pairs >= look)
        word = np.where(is_open, judge(lead, MARGIN), word)
    return word


def share(words, *wanted):
    return float(np.mean(np.isin(words, wanted)))


def test_pairs_are_drawn_as_runs_are_paired():
    one, other = times(0, 1, 10, 0.3, 9), times(1, 1, 10, 0.3, 12)
    drawn, pairs = paired(one, other)
    for row in range(20):
        rates = [
            [Rate(1 / seconds, not reached) for seconds, reached in zip(*of, strict=True)]
            for of in ((one[0][row], one[1][row]), (other[0][row], other[1][row]))
        ]
        found = differences(zip(*rates, strict=True))
        assert 0 < len(found.values) == pairs[row] < REPEATS
        assert found.values == pytest.approx(drawn.values[row, : pairs[row]])
        assert found.at_least == drawn.at_least[row, : pairs[row]].tolist()
        assert found.at_most == drawn.at_most[row, : pairs[row]].tolist()


@pytest.mark.parametrize("spread", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("budget", [EVER, 15, 11, 10, 9, 8])
def test_where_nothing_differs_a_winner_is_named_in_at_most_5_of_100(spread, budget):
    """A budget of 10 ends half of all trainings without the target."""
    words = first_word(times(1, 1, 10, spread, budget), times(2, 1, 10, spread, budget))
    assert share(words, AHEAD, BEHIND) <= 0.05


@pytest.mark.parametrize("budget", [EVER, 15, 12, 10])
@pytest.mark.parametrize("learns", [1.0, 1.3, 2.0])
def test_steps_and_samples_that_make_up_for_each_other_name_no_winner(learns, budget):
    """One side steps so many times as fast, and needs so many times the samples: also where both
    have the same budget of samples, which is another of seconds.
    """
    fast = times(3, 1 / learns, 10 * learns, 0.1, budget)
    words = first_word(fast, times(4, 1, 10, 0.1, budget))
    assert share(words, AHEAD) <= 0.05
    if budget == EVER:
        assert share(words, AHEAD, BEHIND) <= 0.05


def test_a_side_that_does_not_reach_the_target_can_lose_and_is_neither_ahead_nor_level():
    always = times(5, 1, 10, 0.05)
    seldom = times(6, 0.5, 30, 0.05, 30)
    words = first_word(seldom, always)
    assert share(words, BEHIND) >= 0.5 and share(words, AHEAD, LEVEL) <= 0.01
    never = times(7, 1, 50, 0.05, 20)
    assert share(first_word(always, never), AHEAD) == 1.0
    assert share(first_word(never, never), AHEAD, BEHIND, LEVEL) == 0.0


@pytest.mark.parametrize(("lead", "spread", "least"), [(1.1, 0.03, 0.95), (1.3, 0.1, 0.95)])
def test_a_true_lead_is_found_whether_by_steps_or_by_samples(lead, spread, least):
    other = times(9, 1, 10, spread)
    for one in (times(8, 1 / lead, 10, spread), times(8, 1, 10 / lead, spread)):
        words = first_word(one, other)
        assert share(words, AHEAD) >= least and share(words, BEHIND) == 0.0


def test_a_true_lead_that_matters_is_level_in_at_most_5_of_100():
    words = first_word(times(10, 1 / (1 + MARGIN), 10, 0.03), times(11, 1, 10, 0.03))
    assert share(words, LEVEL) <= 0.05
