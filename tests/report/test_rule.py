"""How often the rule of an answer is right: made-up comparisons, a thousand of each sort."""

import math

import numpy as np
import pytest

from hvdtrain.reporting.rule import (
    AHEAD,
    BEHIND,
    LEVEL,
    LOOKS,
    OPEN,
    Differences,
    best_over_best,
    estimate_lead,
    judge,
    judge_distribution,
    last_look,
    repeats_needed,
)

MARGIN = 0.05


def speeds(seed, ratios, spread):
    """Logarithms of the speeds of contenders in [1000, 56] repeats, each of which varies by
    `spread`.
    """
    chance = np.random.default_rng(seed)
    return [math.log(ratio) + chance.normal(0, spread, (1000, LOOKS[-1])) for ratio in ratios]


def at(some, others, repeats, asked=judge):
    pairs = [[Differences((a - b)[:, :repeats]) for b in others] for a in some]
    return asked(best_over_best(pairs), MARGIN)


def first_word(some, others, most=LOOKS[-1], stops=(AHEAD, BEHIND, LEVEL), asked=judge):
    """What each comparison ends with that is looked at after every repeat, until it says one of
    `stops`.
    """
    word = np.full(1000, OPEN)
    for repeats in range(LOOKS[0], most + 1):
        found = at(some, others, repeats, asked)
        word = np.where((word == OPEN) & np.isin(found, stops), found, word)
    return word


@pytest.mark.parametrize("spread", [0.03, 0.05])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 4), (1, 3)])
def test_where_nothing_differs_a_winner_is_named_in_at_most_5_of_100_whoever_stops_when(
    sizes, spread
):
    some, others = (speeds(seed, [1] * size, spread) for seed, size in enumerate(sizes))
    assert np.mean(first_word(some, others, stops=(AHEAD, BEHIND)) != OPEN) <= 0.05


@pytest.mark.parametrize(
    ("sizes", "repeats", "least"), [((1, 1), 5, 0.83), ((1, 1), 7, 0.92), ((3, 4), 10, 0.95)]
)
def test_a_true_lead_of_a_tenth_is_found(sizes, repeats, least):
    some, others = speeds(2, [1.1] * sizes[0], 0.03), speeds(3, [1] * sizes[1], 0.03)
    assert np.mean(first_word(some, others, repeats) == AHEAD) >= least
    assert np.mean(first_word(others, some, repeats) == BEHIND) >= least


@pytest.mark.parametrize(("spread", "repeats"), [(0.02, 10), (0.03, 20)])
def test_that_nothing_differs_is_shown(spread, repeats):
    found = first_word(speeds(4, [1], spread), speeds(5, [1], spread), repeats)
    assert np.mean(found == LEVEL) >= 0.8


def test_a_lead_too_small_to_matter_is_seldom_a_winner():
    found = first_word(speeds(6, [1 + MARGIN / 2], 0.03), speeds(7, [1], 0.03))
    assert np.mean(found == AHEAD) <= 0.1 and np.mean(found == LEVEL) >= 0.7


@pytest.mark.parametrize("lead", [1 + MARGIN, 1.055, 1.07])
def test_a_lead_that_matters_is_called_none_in_at_most_5_of_100_whoever_stops_when(lead):
    assert np.mean(first_word(speeds(6, [lead], 0.03), speeds(7, [1], 0.03)) == LEVEL) <= 0.05


def test_distribution_pays_only_where_it_is_faster_by_the_margin():
    one = speeds(8, [1], 0.03)
    for ratio, right in ((0.8, BEHIND), (1.0, BEHIND), (1.2, AHEAD)):
        found = first_word(speeds(9, [ratio, ratio * 0.9], 0.03), one, 20, asked=judge_distribution)
        assert np.mean(found == right) >= 0.85 and np.mean(found == -right) <= 0.01, ratio


def test_one_machine_that_is_faster_than_each_of_three_is_found_in_five_noisy_repeats():
    """As README's first command makes them on two cores."""
    one, distributed = speeds(12, [1.3], 0.07), speeds(13, [1] * 3, 0.07)
    assert np.mean(at(distributed, one, LOOKS[0], judge_distribution) == BEHIND) >= 0.9


def test_four_repeats_say_nothing_and_between_two_looks_nothing_new():
    ahead = [[Differences([math.log(2.0)] * 4)]]
    assert judge(best_over_best(ahead), MARGIN) == OPEN
    assert [last_look(n)[0] for n in (1, 4, 5, 6, 9, 10, 99)] == [1, 4, 5, 5, 7, 10, 56]
    assert sum(last_look(n)[1] for n in LOOKS) <= 0.05


def test_the_repeats_that_are_said_to_be_needed_find_a_word_in_four_of_five():
    for ratio in (1.0, 1.06, 1.2):
        logs = math.log(ratio) + np.array([-0.05, 0.05, 0.0, -0.04, 0.04])
        pilot = estimate_lead(Differences(logs))
        needed = repeats_needed(pilot, MARGIN, size=1)
        spread = pilot.deviation / math.sqrt(2)
        found = at(speeds(10, [ratio], spread), speeds(11, [1], spread), needed)
        assert np.mean(found != OPEN) >= 0.75
    noisy = estimate_lead(Differences([1.0, -1.0]))
    assert repeats_needed(noisy, MARGIN, size=1) is None
    assert repeats_needed(estimate_lead(Differences([0.1])), MARGIN, 1) == 5
