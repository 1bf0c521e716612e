"""What --slow means, and how long a worker sleeps for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.numerics.slowdown import Slowdown, parse
from hvdtrain.runs.request import check, check_workers


class Time:
    """A clock that stands still but while somebody sleeps, each time for a little longer than
    asked.
    """

    def __init__(self, late=0.0):
        self.now_s, self.late = 0.0, late

    def sleep(self, seconds):
        self.now_s += seconds + self.late

    def now(self):
        return self.now_s


def slowed(text, worker=1, seed=0, late=0.0):
    time = Time(late)
    return Slowdown(text, worker, seed, time.sleep, time.now)


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_a_worker_computes_as_many_times_as_long_as_is_asked_however_late_the_system_wakes_it(
    factor,
):
    slow = slowed(f"1:{factor}x", late=0.001)
    for step in range(1, 101):
        slow.slow(step, 0.0, 0.01)
    assert slow.achieved() == pytest.approx(factor, rel=0.03)


def test_others_are_left_alone():
    other = slowed("1:4x", worker=0)
    assert other.slow(1, 0.0, 1.0) == 0 and other.achieved() == 1


@pytest.mark.parametrize(
    ("text", "step", "elapsed_s", "factor"),
    [
        ("1:4x@step200-400", 199, 0, 1),
        ("1:4x@step200-400", 200, 0, 4),
        ("1:4x@step200-400", 400, 0, 4),
        ("1:4x@step200-400", 401, 0, 1),
        ("1:4x@20s-40s", 1, 19.9, 1),
        ("1:4x@20s-40s", 1, 20, 4),
        ("1:4x@20s-40s", 1, 40, 1),
        ("1:4x+1:1.5x", 1, 0, 6),
        ("all:4x+1:2x", 1, 0, 8),
        ("all:4x+2:2x", 1, 0, 4),
        ("all:4x@20s-40s", 1, 1, 1),
        ("none", 1, 0, 1),
        ("", 1, 0, 1),
    ],
)
def test_a_rule_holds_for_its_steps_or_its_time_and_several_multiply(text, step, elapsed_s, factor):
    assert slowed(text).factor(step, elapsed_s) == factor


def test_any_worker_is_slow_at_some_steps_by_chance_and_the_same_ones_in_every_run():
    def slow_steps(worker, seed):
        slow = slowed("random:6x:p=0.1", worker, seed)
        return [slow.factor(step, 0) == 6 for step in range(2000)]

    assert parse("random:6x:p=.1") == parse("random:6x:p=0.1")
    assert 150 < sum(slow_steps(0, 0)) < 250
    assert slow_steps(0, 0) == slow_steps(0, 0)
    assert slow_steps(0, 0) != slow_steps(1, 0) != slow_steps(1, 1)


def test_a_run_that_was_stopped_and_goes_on_draws_as_one_that_was_not():
    text = "random:6x:p=0.3+jitter:lognormal:0.2"
    whole, first, then = (slowed(text) for _ in range(3))
    expected = [whole.factor(step, 0) for step in range(1, 21)]
    assert [first.factor(step, 0) for step in range(1, 11)] == expected[:10]
    assert [then.factor(step, 0) for step in range(11, 21)] == expected[10:]
    assert len(set(expected)) > 10


@given(st.floats(0.01, 1), st.integers(0, 2**32 - 1), st.integers(0, 100))
def test_jitter_makes_nobody_faster(sigma, seed, worker):
    slow = slowed(f"jitter:lognormal:{sigma:.3f}", worker, seed)
    assert all(slow.factor(step, 0) >= 1 for step in range(20))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "'fast' is none of 1:4x"),
        ("1:4", "'1:4' is none of"),
        ("1:4x+", "'' is none of"),
        ("1:0.5x", "below 1"),
        ("random:6x:p=2", "not a probability"),
        ("1:4x@40s-20s", "ends before it begins"),
        ("1:4x@step9-3", "ends before"),
        ("-1:4x", "none of"),
        ("1:infx", "none of"),
        ("1:1001x", "more than a factor of 1000"),
        ("jitter:lognormal:3", "a jitter of 2"),
        ("1:4x@step0-0", "ends"),
        ("\u0663:4x", "none of"),
    ],
)
def test_what_is_none_of_the_forms_lists_them(text, said):
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        check(RunConfig(slow=text))
    with pytest.raises(UsageError):
        parse(text)


def test_a_worker_that_there_is_not_is_refused_and_a_slow_machines_baseline_is_not():
    with pytest.raises(UsageError, match="there is no worker 2; workers are 0 to 1"):
        check_workers(RunConfig(mode="ddp", slow="0:2x+2:4x"), 2)
    check_workers(check(RunConfig(mode="single", slow="0:4x")), 1)
