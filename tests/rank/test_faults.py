"""What goes wrong in the numbers or in the data goes wrong for all ranks alike."""

import json
import math

import pytest
import torch
from helpers.jobs import JOB, hvdtrain, run, steps
from safetensors.torch import load_file

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("beside_digits")]


def test_a_loss_that_becomes_nan_ends_all_ranks_at_the_same_step_and_is_said(tmp_path):
    out = tmp_path / "run"
    options = ["--mode", "ps-sync", "--servers", "1", *JOB, "--optimizer", "sgd", "--lr", "1e11"]
    done = run("forked", 3, *options, "--out", str(out))
    assert done.returncode == 0 and "training diverged" in done.stdout, done.stdout
    for rank in (1, 2):
        rows = steps(out, rank)
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert not math.isfinite(rows[-1]["loss"])
    assert not math.isfinite(json.loads((out / "summary.json").read_text())["val_loss"])
    weights = load_file(out / "snapshots" / "final.safetensors").values()
    assert any(not torch.isfinite(tensor).all() for tensor in weights)


def test_a_full_disk_is_named_with_what_to_do(tmp_path):
    first = """
from hvdtrain.job.recording import snapshot
def save_file(*_):
    raise snapshot.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
snapshot.save_file = save_file
"""
    noise = ["--dataset", "synthetic", "--image-size", "32"]
    done = hvdtrain("train", *JOB, *noise, "--out", tmp_path / "run", first=first)
    place = tmp_path / "run" / "snapshots" / "final.safetensors"
    told = f"rank 0 failed: No space left on device: make room on the disk of {place} (see "
    assert done.returncode == 1 and told in done.stdout, done.stdout


OTHER_IMAGES = """
import os
from hvdtrain.job.rank import prepare
identity = prepare.identity
prepare.identity = lambda data: identity(data) + ("0" if os.environ["RANK"] == "2" else "")
"""


def test_workers_that_have_other_images_are_told_and_all_end(tmp_path):
    options = ["--mode", "ps-sync", "--servers", "1", *JOB, "--out", str(tmp_path / "run")]
    done = hvdtrain("train", *options, ranks=3, first=OTHER_IMAGES, survive=True)
    assert done.returncode == 1
    for rank in (1, 2):
        assert (
            f"hvdtrain: rank {rank} failed: ranks [2] have other data than that of rank 1"
            in done.stdout
        )
