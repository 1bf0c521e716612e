"""What --dry-run says that a grid will take."""

import dataclasses
import itertools
from pathlib import Path

from hvdtrain.compare import forecast
from hvdtrain.compare.forecast import Record, disk_bytes, forecast_lines
from hvdtrain.compare.grid import Axes, in_rounds, plan
from hvdtrain.config.run_config import RunConfig

VGG16 = RunConfig(model="vgg16", width=1.0, snapshot_every="never")
WEIGHTS = 128e6 * 4


def grid(config=VGG16, modes="single,allreduce,ps-sync", repeats=1, **axes):
    given = Axes(modes.split(","), **axes)
    contenders = plan(dataclasses.replace(config, threads=1), given)
    return [*itertools.chain(*in_rounds(contenders, repeats))]


def lines(runs, folder, kept=None, pilots=()):
    return list(forecast_lines(runs, pilots, kept or {}, folder, Record(folder)))


def test_what_a_run_leaves():
    assert disk_bytes(VGG16) == 2 * WEIGHTS  # the final and the best
    saving = dataclasses.replace(VGG16, snapshot_every="epoch", keep_snapshots=2)
    assert disk_bytes(saving) == 2 * WEIGHTS + 2 * 3 * WEIGHTS  # Adam has two states a weight
    assert disk_bytes(dataclasses.replace(saving, sprint=4.0)) == 0
    assert disk_bytes(RunConfig(model="resnet8", snapshot_every="never")) == 2 * 8e6


def test_four_modes_of_vgg16_three_times_leave_what_was_measured(tmp_path):
    [told] = lines(grid(modes="single,allreduce,ps-sync,ps-async", repeats=3), tmp_path)
    assert "forecast: 12 runs to do take " in told and "leave about 12.3 GB in " in told  # 12.7 GB were found


def test_time_is_what_runs_before_took_or_a_guess(tmp_path):
    runs = grid(RunConfig(snapshot_every="never"), modes="single,allreduce", repeats=6)
    [told] = lines(runs, tmp_path, pilots=runs[:1])
    assert "take at most about 6 min, which is a guess: nothing has run yet" in told  # 22 s of training each
    record = Record(tmp_path)
    record.samples = 960
    record.finished(runs[0].sprint(4.0), 480.0, 4 + 1 + 7.0)
    assert record.seconds(runs[0]) == 15 * 960 / 480 + 7
    assert Record(tmp_path).seconds(runs[0].sprint(2.0)) == 2 + 1 + 7
    assert "guess" not in lines(runs, tmp_path)[0]


def test_finished_runs_are_not_made_again(tmp_path):
    runs = grid(RunConfig(snapshot_every="never"), repeats=2)
    [told] = lines(runs, tmp_path, {runs[0].name: Path("x")})
    assert "5 runs to do (1 are there already, and stay) take" in told and "leave about 80.0 MB" in told


def test_what_does_not_fit_and_what_is_not_there_is_told(tmp_path, monkeypatch):
    runs = grid(dataclasses.replace(VGG16, dataset="./nosuch", pretrained="no.pth", width=4.0), modes="single")
    monkeypatch.setattr(forecast.shutil, "disk_usage", lambda path: type("Disk", (), {"free": 10**9}))
    disk, dataset, pretrained = lines(runs, tmp_path)[1:]
    assert disk.startswith("too large: 16.4 GB do not fit in ")
    assert dataset.startswith("missing: --dataset ./nosuch is neither a folder nor one of ")
    assert pretrained == "missing: --pretrained no.pth is no file"


def test_a_data_set_that_is_made_up_is_not_missing(tmp_path):
    for dataset in ("synthetic", "digits", "s3://bucket/shards"):
        runs = grid(RunConfig(dataset=dataset, snapshot_every="never"), modes="single")
        assert not [line for line in lines(runs, tmp_path) if line.startswith("missing")], dataset
