"""How often the rule is right about times to the target: made-up comparisons, a thousand of each sort."""

import math

import numpy as np
import pytest

from hvdtrain.reporting.measures import LEAST_TOLD, Rate, differences
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
    told = (one[1] | other[1]).cumsum(1)
    word = np.full(COMPARISONS, OPEN)
    for look in LOOKS:
        lead = estimate_lead(Differences(values[:, :look], at_least[:, :look], at_most[:, :look]))
        repeats = 1 + (told < look).sum(1)  # until so many pairs say something
        is_open = (word == OPEN) & (pairs >= look) & (look >= LEAST_TOLD * repeats)
        word = np.where(is_open, judge(lead, MARGIN), word)
    return word


def share(words, *wanted):
    return float(np.mean(np.isin(words, wanted)))


def test_pairs_are_drawn_as_runs_are_paired():
    one, other = times(0, 1, 10, 0.3, 11), times(1, 1, 10, 0.3, 14)
    drawn, pairs = paired(one, other)
    assert min(pairs[:20]) < REPEATS
    for row in range(20):
        rates = [
            [Rate(1 / seconds, not reached) for seconds, reached in zip(*of, strict=True)]
            for of in ((one[0][row], one[1][row]), (other[0][row], other[1][row]))
        ]
        found = differences(zip(*rates, strict=True))
        assert LEAST_TOLD * REPEATS <= len(found.values) == pairs[row] <= REPEATS
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
    assert share(words, AHEAD, BEHIND) <= 0.05


@pytest.mark.parametrize("spread", [0.1, 0.3])
@pytest.mark.parametrize("budget", [EVER, 12, 10, 9.5, 9, 8])
def test_who_varies_more_is_not_ahead_by_the_trainings_that_happen_to_be_quick(spread, budget):
    """Both need as many samples in the mean. With a small budget only quick trainings reach the
    target, which the side that varies more has.
    """
    words = first_word(times(12, 1, 10, spread, budget), times(13, 1, 10, 0.05, budget))
    assert share(words, AHEAD, BEHIND) <= 0.05


def test_too_few_pairs_in_which_the_target_was_reached_tell_nothing():
    reached = Rate(1 / 9), Rate(1 / 10, is_at_most=True)
    neither = Rate(1 / 10, is_at_most=True), Rate(1 / 10, is_at_most=True)
    found = differences([reached] * 6 + [neither] * 2)
    assert found.at_least == [True] * 6 and not any(found.at_most)
    found = differences([reached] * 6 + [neither] * 3)
    assert len(found.values) == 6 and all(found.at_least) and all(found.at_most)


@pytest.mark.parametrize("budget", [EVER, 11, 10])
def test_seeds_that_are_hard_for_both_make_no_winner(budget):
    hard = np.exp(np.random.default_rng(14).normal(0, 0.2, (COMPARISONS, REPEATS)))

    def beside(seed):
        seconds, _ = times(seed, 1, 10, 0.1)
        return np.minimum(seconds * hard, budget), seconds * hard <= budget

    assert share(first_word(beside(15), beside(16)), AHEAD, BEHIND) <= 0.05


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
