"""The search for learning rates: equal for each mathematics, with other seeds, noted and reused."""

import pytest
from helpers.report_runs import run as made_run
from helpers.report_runs import write

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.comparing.comparison_state import ComparisonState, conducted, tried_lines
from hvdtrain.comparing.grid import Axes, plan
from hvdtrain.comparing.rates import (
    FACTORS,
    FINER,
    TRAININGS,
    VARIANTS,
    find_rates,
    trials_of,
    variants_of,
    with_found_rates,
)
from hvdtrain.reporting.comparisons import split_into_comparisons
from hvdtrain.reporting.content import collect
from hvdtrain.reporting.fairness import check
from hvdtrain.runs.read import find_runs

BEST = {"allreduce": 6e-4, "ps-async": 1.5e-4}
MODES = ["allreduce", "ps-sync", "ps-async"]


@pytest.fixture
def contenders():
    return plan(RunConfig(stop_at_target=True), Axes(MODES))


class Trainings:
    """Made-up trainings that take fewest epochs at the best rate of their mode, and fewer where an
    option has this value.
    """

    def __init__(self, better="", value=None):
        self.runs = []
        self.names = []
        self.better = better
        self.value = value

    def __call__(self, planned, name):
        self.runs.append(planned)
        self.names.append((planned.name, name))
        config = planned.config
        ratio = config.lr / BEST[config.mode]
        better = 0.004 if self.better and getattr(config, self.better) == self.value else 0.0
        return made_run("allreduce", 2, accuracy=1.0 - 0.01 * max(ratio, 1 / ratio) + better)


def test_each_mathematics_has_as_many_rates_and_trainings_with_other_seeds(contenders, tmp_path):
    train, state = Trainings(), ComparisonState(tmp_path)
    lockstep, asynchronous = find_rates(contenders, state, train)
    assert lockstep.of == ["allreduce-w2", "ps-sync-w2-s1"] and lockstep.trained == "allreduce-w2"
    assert (lockstep.found, asynchronous.found) == (6e-4, 1.5e-4)
    assert lockstep.trainings == asynchronous.trainings == TRAININGS == len(train.runs) / 2
    for rate in (lockstep, asynchronous):
        rates, others = rate.tried[: len(FACTORS)], rate.tried[len(FACTORS) :]
        assert [tried.lr for tried in rates] == [3e-4 * factor for factor in FACTORS]
        assert sorted(tried.trainings for tried in rates) == [1, 1, 2, 3, 3]
        assert sorted(tried.trainings for tried in others) == [1, 2, 3]
    repeats = {run.as_repeat(number).config.seed for run in contenders for number in range(1, 57)}
    assert not repeats & {run.config.seed for run in train.runs}
    assert len(set(train.names)) == len(train.runs)
    by_mode = {
        mode: sorted(run.config.seed for run in train.runs if run.config.mode == mode)
        for mode in BEST
    }
    assert by_mode["allreduce"] == by_mode["ps-async"]


def test_both_sides_are_searched_beside_the_slow_worker_that_they_are_compared_beside(tmp_path):
    """One machine, which has no such worker, computes what lockstep does, and shares its search."""
    axes = Axes(["single", "allreduce", "ps-async"], options={"slow": ["1:4x"]})
    contenders = plan(RunConfig(stop_at_target=True), axes)
    train = Trainings()
    found = find_rates(contenders, ComparisonState(tmp_path), train)
    assert [rate.of for rate in found] == [["allreduce-w2", "single-w1"], ["ps-async-w2-s1"]]
    assert {run.config.slow for run in train.runs} == {"1:4x"}


def test_whoever_is_slow_changes_no_step_in_lockstep_which_is_searched_once(tmp_path):
    axes = Axes(["allreduce", "ps-async"], options={"slow": ["none", "1:4x"]})
    contenders = plan(RunConfig(stop_at_target=True), axes)
    train, state = Trainings(), ComparisonState(tmp_path)
    lockstep, *asynchronous = find_rates(contenders, state, train)
    assert lockstep.of == ["slow-none-allreduce-w2", "slow-1_4x-allreduce-w2"]
    assert len(asynchronous) == 2 and len(train.runs) == 3 * TRAININGS
    assert {run.config.slow for run in train.runs[:TRAININGS]} == {"none"}
    assert all(map(state.found_rate, contenders))


def test_as_many_trainings_are_foretold_as_there_are(contenders):
    trials = trials_of(contenders[:1])
    assert len(trials) == TRAININGS and len({run.config.lr for run in trials}) == len(FACTORS)


def test_what_was_found_stays_in_the_folder_and_new_modes_share_it(contenders, tmp_path):
    train = Trainings()
    find_rates(contenders[:1], ComparisonState(tmp_path), train)
    state = ComparisonState(tmp_path)
    [found] = find_rates(contenders, state, train)
    assert found.of == ["ps-async-w2-s1"] and len(train.runs) == 2 * TRAININGS
    rates = {run.config.mode: run.config.lr for run in with_found_rates(contenders, state)}
    assert rates == {"allreduce": 6e-4, "ps-sync": 6e-4, "ps-async": 1.5e-4}
    assert conducted([tmp_path]).rates == state.rates
    [lines] = tried_lines(tmp_path).values()
    assert "0.0006: 3 of 3 reached the target" in lines[0]
    with_rate = with_found_rates(contenders, state)[0].config
    assert (with_rate.lr_around, with_rate.lr_trainings) == (3e-4, TRAININGS)


def test_as_many_other_settings_are_tried_at_the_best_rate(contenders, tmp_path):
    found = find_rates(contenders, ComparisonState(tmp_path), Trainings())
    lockstep, asynchronous = [[tried.settings for tried in rate.tried[5:]] for rate in found]
    assert lockstep[0].startswith("--warmup ") and lockstep[1:] == ["", ""]  # finer rates
    assert asynchronous[:2] == ["--push-scale none", "--push-scale mean"]
    assert asynchronous[2] == lockstep[0]
    ssp = plan(RunConfig(stop_at_target=True), Axes(["ps-ssp"]))[0]
    tried = [settings for _, settings in variants_of(ssp, 3e-4, 1500, ())]
    assert tried[:2] == [{"staleness": 4}, {"push_scale": "none"}] and "warmup" in tried[2]


def test_what_was_given_is_not_varied_and_as_much_is_tried(contenders):
    given = {"warmup", "push_scale"}
    for run in (contenders[0], contenders[2]):
        variants = variants_of(run, 3e-4, 1500, given)
        assert len(variants) == VARIANTS and not any(settings for _, settings in variants)


def test_a_setting_that_was_found_is_of_the_runs_and_stands_in_the_report(contenders, tmp_path):
    state = ComparisonState(tmp_path)
    train = Trainings("push_scale", "none")
    lockstep, asynchronous = find_rates(contenders, state, train)
    assert not lockstep.settings and asynchronous.words == "0.00015 with --push-scale none"
    config = with_found_rates(contenders, state)[2].config
    assert config.push_scale == "none" and config.looked_for == "push_scale,warmup"
    [lines] = tried_lines(tmp_path).values()
    assert "0.00015 --push-scale none: 3 of 3 reached the target" in lines[1]
    assert ComparisonState(tmp_path).rates == state.rates


def test_a_rate_whose_trainings_fail_or_do_not_reach_the_target_is_not_found(contenders, tmp_path):
    def train(planned, name):
        if planned.config.lr > 3e-4:
            return None
        accuracy = 0.98 if planned.config.lr < 1e-4 else 0.9
        return made_run("allreduce", 2, accuracy=accuracy + 0.01 * (planned.config.lr < 7e-5))

    [found] = find_rates(contenders[:1], ComparisonState(tmp_path), train)
    assert found.found == pytest.approx(7.5e-5 / FINER) and found.is_at_edge


def test_where_nothing_can_be_told_the_given_rate_stays(contenders, tmp_path):
    [found] = find_rates(contenders[:1], ComparisonState(tmp_path), lambda planned, name: None)
    assert found.found == found.around == 3e-4 and not found.is_at_edge


def found_at(lr, trainings=10):
    return {"lr": lr, "effective_lr": lr, "lr_around": 3e-4, "lr_trainings": trainings}


def test_rates_may_differ_that_were_looked_for_alike_and_no_others(tmp_path):
    write(tmp_path, "allreduce", 2, change=found_at(6e-4))
    write(tmp_path, "ps-async", 2, 1, change=found_at(1.5e-4))
    [compared] = split_into_comparisons(find_runs([tmp_path]))
    assert check(compared.runs)
    assert "lr looked for around 0.0003" in collect(compared.runs).first_screen()
    write(tmp_path, "ps-sync", 2, 1, change=found_at(1.2e-3, trainings=40))
    message = "lr differs among runs of the same global batch and model: .*in 10 trainings"
    with pytest.raises(UsageError, match=message):
        check(find_runs([tmp_path]))
