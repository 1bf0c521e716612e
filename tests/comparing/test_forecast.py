"""What --dry-run says that a grid will take."""

import itertools

from hvdtrain.comparing.forecast import Record, forecast
from hvdtrain.comparing.grid import Axes, in_rounds, plan
from hvdtrain.config.run_config import RunConfig
from hvdtrain.runs.live import warm_up_s

SMALL = RunConfig(snapshot_every="never", threads=1)


def grid(config=SMALL, modes="single,allreduce,ps-sync", repeats=1):
    return [*itertools.chain(*in_rounds(plan(config, Axes(modes.split(","))), repeats))]


def told(runs, folder, kept=(), pilots=()):
    return forecast(runs, pilots, kept, Record(folder))


def test_time_is_what_runs_before_took_or_a_guess(tmp_path):
    runs = grid(modes="single,allreduce", repeats=6)
    assert "take at most about 6 min, which is a guess: nothing has run yet" in told(
        runs, tmp_path, pilots=runs[:1]
    )  # 22 s of training each
    record = Record(tmp_path)
    record.samples = 960
    record.finished(runs[0].sprint(4.0), 480.0, 4 + warm_up_s(4.0) + 7)
    assert record.seconds(runs[0]) == 15 * 960 / 480 + 7
    assert Record(tmp_path).seconds(runs[0].sprint(2.0)) == 2 + warm_up_s(2.0) + 7
    assert "guess" not in told(runs, tmp_path)


def test_finished_runs_are_not_made_again(tmp_path):
    runs = grid(repeats=2)
    assert "5 runs to do (1 are there already, and stay) take about" in told(runs, tmp_path, [runs[0].name])
