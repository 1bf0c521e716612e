"""Sprints: how fast steady steps are, and nothing else."""

import json

import numpy as np
import pytest
from helpers.jobs import adds_up, run, steps

from hvdtrain.runs.live import WARM_UP, WARM_UP_S
from hvdtrain.runs.read import load_run

SPRINT = ["--width", "0.0625", "--threads", "1", "--sprint", "0.5s", "--out"]
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("mode", "servers", "more"),
    [("single", 0, []), ("ddp", 0, []), ("ps-sync", 1, ["--wire", "zmq"]), ("ps-async", 1, []),
     ("ps-async", 1, ["--shares", "equal"])],
    ids=str,
)  # fmt: skip
def test_a_sprint_measures_what_comes_after_its_warm_up(mode, servers, more, tmp_path):
    ranks = servers + (1 if mode == "single" else 2)
    done = run("forked", ranks, "--mode", mode, "--servers", str(servers), *more, *SPRINT, str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout
    finished = load_run(tmp_path / "run")
    assert finished.is_finished and finished.manifest.sprint == finished.summary.sprint == 0.5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = [step for rank in range(servers, ranks) for step in steps(tmp_path / "run", rank)]
    assert 0.45 <= summary["wall_s"] < 1.5 and max(row["time"] for row in rows) > WARM_UP_S + 0.4
    last, counted = max(row["step"] for row in rows), summary["steps"]
    assert last - counted >= WARM_UP
    steady = [row for row in rows if row["step"] > last - counted]
    assert sum(row["samples"] for row in steady) == summary["samples"] > 0
    assert sum(row["samples"] or 0 for row in summary["processes"]) == summary["samples"]
    assert summary["samples_per_s"] == pytest.approx(summary["samples"] / summary["wall_s"])
    assert adds_up(summary)
    assert summary["val_accuracy"] is summary["val_loss"] is summary["time_to_target_s"] is None
    assert summary["evaluations"] == []
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not {name for name in left if name.endswith(".safetensors") or "events" in name or name == "answers.bin"}


def test_a_whole_run_keeps_which_images_its_last_model_told_rightly(tmp_path):
    out = tmp_path / "run"
    done = run("forked", 2, "--mode", "ddp", "--width", "0.0625", "--threads", "1", "--epochs", "2", "--out", str(out))
    assert done.returncode == 0, done.stdout
    finished = load_run(out)
    images = finished.manifest.validation_samples
    packed = np.fromfile(out / "answers.bin", dtype=np.uint8)
    assert len(packed) == -(-images // 8)
    assert np.unpackbits(packed, count=images).mean() == pytest.approx(finished.summary.val_accuracy)


@pytest.mark.parametrize("other", [["--steps", "3"], ["--epochs", "1"], ["--time-budget", "9s"]], ids=str)
def test_a_sprint_has_one_length(other, tmp_path):
    done = run("forked", 1, *SPRINT, str(tmp_path / "run"), *other)
    assert done.returncode == 2 and "exclude each other: give one" in done.stdout
