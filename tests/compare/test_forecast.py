"""What --dry-run says that a grid will take."""

import dataclasses
from pathlib import Path

import pytest

from hvdtrain.compare import forecast
from hvdtrain.compare.forecast import bytes_per_step, disk_bytes, forecast_lines, memory_bytes
from hvdtrain.compare.grid import Axes, plan
from hvdtrain.config.run_config import RunConfig
from hvdtrain.launch.hosts import Host

VGG16 = RunConfig(model="vgg16", width=1.0, snapshot_every="never")
WEIGHTS = 128e6 * 4


def grid(config=VGG16, modes="single,allreduce,ps-sync", repeats=1, hosts=(), **axes):
    given = Axes(modes.split(","), models=[config.model], repeats=repeats, **axes)
    return plan(dataclasses.replace(config, threads=1), given, hosts, "ssh")


def test_what_a_step_sends_and_a_run_leaves():
    single, ring, ps = grid()
    assert [bytes_per_step(run.config, run.workers) for run in (ring, ps)] == [2 * WEIGHTS, 4 * WEIGHTS]
    assert disk_bytes(single.config) == 2 * WEIGHTS  # the final and the best
    saving = dataclasses.replace(VGG16, snapshot_every="epoch", keep_snapshots=2)
    assert disk_bytes(saving) == 2 * WEIGHTS + 2 * 3 * WEIGHTS  # Adam has two states a weight
    assert disk_bytes(RunConfig(model="resnet8", snapshot_every="never")) == 2 * 8e6


def test_four_modes_of_vgg16_three_times_leave_what_was_measured(tmp_path):
    *_, last = forecast_lines(grid(modes="single,allreduce,ps-sync,ps-async", repeats=3), {}, tmp_path)
    assert last.startswith("forecast: 12 runs to do leave about 12.3 GB in ")  # 12.7 GB were found


def test_memory_is_that_of_the_fullest_host():
    [ring] = grid(modes="allreduce", workers=[4], hosts=[Host("a", 3), Host("b", 1)])
    [here] = grid(modes="allreduce", workers=[4])
    assert memory_bytes(ring) == pytest.approx(memory_bytes(here) * 3 / 4)


def test_each_kind_of_run_is_one_line_and_finished_runs_are_not_made_again(tmp_path):
    runs = grid(RunConfig(snapshot_every="never"), repeats=2)
    *kinds, all_runs = forecast_lines(runs, {runs[0].name: Path("x")}, tmp_path)
    assert [line.split(":")[1] for line in kinds] == [
        " single with 1 worker", " allreduce with 2 workers", " ps-sync with 2 workers, 1 server",
    ]  # fmt: skip
    assert "sends" not in kinds[0] and "sends about 16.0 MB a step" in kinds[1]
    assert "5 runs to do (1 are there already, and stay) leave about 80.0 MB" in all_runs


def test_what_does_not_fit_and_what_is_not_there_is_told(tmp_path, monkeypatch):
    runs = grid(dataclasses.replace(VGG16, dataset="./nosuch", pretrained="no.pth", width=4.0), modes="single")
    monkeypatch.setattr(forecast.shutil, "disk_usage", lambda path: type("Disk", (), {"free": 10**9}))
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 10**9}))
    disk, memory, dataset, pretrained = list(forecast_lines(runs, {}, tmp_path))[2:]
    assert disk.startswith("too large: 16.4 GB do not fit in ") and "free on this machine" in memory
    assert dataset.startswith("missing: --dataset ./nosuch is neither a folder nor one of ")
    assert pretrained == "missing: --pretrained no.pth is no file"


def test_a_data_set_that_is_made_up_is_not_missing(tmp_path):
    for dataset in ("synthetic", "digits", "s3://bucket/shards"):
        runs = grid(RunConfig(dataset=dataset, snapshot_every="never"), modes="single")
        assert not [line for line in forecast_lines(runs, {}, tmp_path) if line.startswith("missing")], dataset
