"""Sprints: how fast steady steps are, and nothing else."""

import json
import subprocess

import pytest
from helpers.forked_jobs import env_with_forks
from helpers.jobs import adds_up, hvdtrain, steps

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.job.training.sprint import LEAST_STEPS
from hvdtrain.models import make
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.read import load_run
from hvdtrain.runs.request import check

SPRINT_S = 0.3
SPRINT = ["--width", "0.0625", "--threads", "1", "--sprint", f"{SPRINT_S}s", "--out"]
# What a rank runs first, so that its warm-up is as long.
WARM_UP_S = SPRINT_S
WARMS_UP = (
    "from hvdtrain.job.training import sprint; from hvdtrain.runs import live; "
    f"live.WARM_UP_S = sprint.WARM_UP_S = {WARM_UP_S}"
)
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("mode", "servers", "more"),
    [("ddp", 0, []), ("ps-async", 1, []), ("ps-async", 1, ["--shares", "equal"])],
    ids=str,
)
def test_a_sprint_measures_what_comes_after_its_warm_up(mode, servers, more, tmp_path):
    ranks = servers + 2
    words = ["--mode", mode, "--servers", servers, *more, *SPRINT, tmp_path / "run"]
    done = hvdtrain("train", *words, ranks=ranks, first=WARMS_UP)
    assert done.returncode == 0, done.stdout
    finished = load_run(tmp_path / "run")
    assert finished.is_finished and finished.manifest.sprint == finished.summary.sprint == SPRINT_S
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = [step for rank in range(servers, ranks) for step in steps(tmp_path / "run", rank)]
    last, counted, whole_s = (
        max(row["step"] for row in rows),
        summary["steps"],
        max(row["time"] for row in rows),
    )
    # Workers in lockstep decide a step ahead: see StepBarrier.after.
    step_s = whole_s / last
    assert SPRINT_S - step_s <= summary["wall_s"] < whole_s - WARM_UP_S / 2
    assert whole_s > WARM_UP_S + SPRINT_S - 0.1
    assert last - counted >= WARM_UP
    steady = [row for row in rows if row["step"] > last - counted]
    assert sum(row["samples"] for row in steady) == summary["samples"] > 0
    assert sum(row["samples"] or 0 for row in summary["processes"]) == summary["samples"]
    assert summary["samples_per_s"] == pytest.approx(summary["samples"] / summary["wall_s"])
    assert adds_up(summary)
    assert summary["val_accuracy"] is summary["val_loss"] is summary["time_to_target_s"] is None
    assert summary["evaluations"] == []
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not {
        name
        for name in left
        if name.endswith(".safetensors") or "events" in name or name == "answers.bin"
    }


def test_a_sprint_measures_some_steps_of_full_batches_however_long_they_take(few_digits, tmp_path):
    """Of 92 images a third batch of 40 would have twelve."""
    options = [
        "--dataset",
        str(few_digits),
        "--batch-size",
        "40",
        "--sprint",
        "0.001s",
        "--out",
        str(tmp_path / "run"),
    ]
    done = hvdtrain("train", *SPRINT[:4], *options, first=WARMS_UP)
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == LEAST_STEPS
    assert {row["samples"] for row in steps(tmp_path / "run", 0)} == {40}


def test_a_sprint_needs_no_room_for_weights(few_digits, tmp_path):
    """On a disk of 1 MB, which the model's weights would not fit on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    in_namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=1m tmpfs {disk}"
    if subprocess.run([*in_namespace, mount], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    weights = make("cnn", 10, 1).state_dict()
    assert sum(tensor.nbytes for tensor in weights.values()) > 2**20
    options = f"--model cnn --dataset {few_digits} --threads 1 --batch-size 8 --sprint 0.1s"
    job = f"hvdtrain train {options} --out {disk}/run"
    command = f"{mount} && {job} && cat {disk}/run/summary.json"
    words = [*in_namespace, command]
    done = subprocess.run(words, env=env_with_forks(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"samples_per_s"' in done.stdout


def test_a_sprint_has_one_length():
    with pytest.raises(UsageError, match="exclude each other: give one"):
        check(RunConfig(sprint=0.5, steps=3))
