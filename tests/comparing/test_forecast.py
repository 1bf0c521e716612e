"""What --dry-run says that a grid will take."""

import itertools

from hvdtrain.base.config.run_config import DEFAULT_EPOCHS, RunConfig
from hvdtrain.comparing.comparison_state import ComparisonState
from hvdtrain.comparing.forecast import expected_seconds, forecast
from hvdtrain.comparing.grid import Axes, in_rounds, plan
from hvdtrain.runs.live import warm_up_s

SMALL = RunConfig(snapshot_every="never", threads=1)


def grid(config=SMALL, modes="single,allreduce,ps-sync", repeats=1):
    return [*itertools.chain(*in_rounds(plan(config, Axes(modes.split(","))), repeats))]


def told(runs, folder, kept=(), pilots=()):
    return forecast(runs, pilots, kept, ComparisonState(folder))


def test_time_is_what_runs_before_took_or_a_guess(tmp_path):
    runs = grid(modes="single,allreduce", repeats=6)
    # 15 s of training each
    assert "12 runs to do, at most about 4 min, which is a guess: nothing has run yet" in told(
        runs, tmp_path, pilots=runs[:1]
    )
    state = ComparisonState(tmp_path)
    state.samples = 960
    state.note_finished(runs[0].sprint(4.0), 480.0, 4 + warm_up_s(4.0) + 7)
    assert expected_seconds(runs[0], state) == DEFAULT_EPOCHS * 960 / 480 + 7
    assert (
        expected_seconds(runs[0].sprint(2.0), ComparisonState(tmp_path)) == 2 + warm_up_s(2.0) + 7
    )
    assert "guess" not in told(runs, tmp_path)


def test_what_has_not_run_takes_as_long_as_others_of_its_family_did(tmp_path):
    state = ComparisonState(tmp_path)
    single, ring, served = grid(modes="single,allreduce,ps-sync")
    [ddp] = grid(modes="ddp")
    by_family = {run.family: run for run in (single, ring, served)}
    for family, around_s in (("one machine", 3.0), ("ring", 6.0), ("servers", 9.0)):
        sprint = by_family[family].sprint(2.0)
        state.note_finished(sprint, 500.0, 2 + warm_up_s(2.0) + around_s)
    assert expected_seconds(ddp.sprint(2.0), state) == 2 + warm_up_s(2.0) + 6.0


def test_finished_runs_are_not_made_again(tmp_path):
    runs = grid(repeats=2)
    assert "5 runs to do (finished already: 1), about" in told(runs, tmp_path, [runs[0].name])
