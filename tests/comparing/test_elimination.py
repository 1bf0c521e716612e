"""The rule by which a search leaves settings out, simulated."""

import math

import numpy as np
import pytest

from hvdtrain.comparing.elimination import (
    ERROR,
    compare_speeds,
    half_width,
    least_rounds,
    pooled_spread,
)

SIMULATED = 2000


def tables(draw, truths, rounds, deviation=0.04, drift=0.1):
    """The speeds of two sides, in rounds that differ as a machine does over time."""
    found = []
    for truth in truths:
        logs = (
            np.log(truth)[:, None]
            + draw.normal(0, drift, rounds)
            + draw.normal(0, deviation, (len(truth), rounds))
        )
        found.append({str(number): list(np.exp(row)) for number, row in enumerate(logs)})
    return found


def left_out(side, of):
    """The settings of a side that are shown to be slower than one of the others."""
    pairs = ((one, other) for one in side for other in side if one != other)
    return {
        one
        for one, other in pairs
        if compare_speeds(side[one], side[other], of, len(side) - 1).high < 1
    }


@pytest.mark.parametrize(
    ("settings", "rounds"), [((4, 4), 2), ((2, 2), 3), ((8, 8), 2), ((2, 0), 4)]
)
def test_a_setting_that_is_as_fast_as_the_others_is_left_out_in_five_of_a_hundred_searches(
    settings, rounds
):
    assert rounds >= least_rounds(settings)
    draw, lost = np.random.default_rng(1), 0
    for _ in range(SIMULATED):
        found = tables(draw, [np.ones(number) for number in settings], rounds)
        lost += "0" in left_out(found[0], pooled_spread(found))
    noise = 3 * math.sqrt(ERROR * (1 - ERROR) / SIMULATED)
    assert lost / SIMULATED <= ERROR + noise


def test_looking_after_each_round_keeps_the_error():
    draw, lost = np.random.default_rng(2), 0
    for _ in range(SIMULATED):
        found = tables(draw, [np.ones(4), np.ones(4)], 8)
        for rounds in range(2, 9):
            so_far = [{name: speeds[:rounds] for name, speeds in side.items()} for side in found]
            if "0" in left_out(so_far[0], pooled_spread(so_far)):
                lost += 1
                break
    assert lost / SIMULATED <= ERROR


def test_one_that_is_slower_by_a_third_is_found_in_two_rounds():
    draw, found = np.random.default_rng(3), 0
    for _ in range(200):
        both = tables(draw, [np.array([0.75, 1, 1, 1]), np.ones(4)], 2)
        found += "0" in left_out(both[0], pooled_spread(both))
    assert found > 190


def test_the_spread_is_that_of_sprints_and_not_of_rounds_or_settings():
    draw = np.random.default_rng(4)
    of = pooled_spread(
        tables(draw, [np.linspace(1, 3, 40), np.linspace(1, 2, 40)], 20, deviation=0.04, drift=0.5)
    )
    assert of.deviation == pytest.approx(0.04, rel=0.1) and of.freedom == 2 * 39 * 19


def test_what_is_not_known_leaves_nobody_out():
    assert half_width(pooled_spread([]), 2, 1) == math.inf
    assert half_width(pooled_spread([{"a": [1.0, 2.0]}]), 2, 1) == math.inf
    found = compare_speeds([1.0, 1.0], [1e9, 1e9], pooled_spread([{"a": [1.0, 1.0]}]), 1)
    assert found.ratio == pytest.approx(1e-9) and found.high > 1


@pytest.mark.parametrize(
    ("numbers", "rounds"), [((4, 4), 2), ((2, 2), 3), ((2,), 4), ((1, 4), 2), ((1, 1), 2)]
)
def test_a_few_settings_sprint_more_often_so_that_their_spread_is_known(numbers, rounds):
    assert least_rounds(numbers) == rounds
