"""Real jobs whose workers take several steps between two exchanges."""

import json
import os

import pytest
import torch
from helpers.jobs import LITTLE, hvdtrain
from helpers.weights import SMOOTH, SMOOTH_BATCH_NORM, assert_same_weights
from safetensors.torch import load_file

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("beside_digits")]

JOB = [
    "--dataset",
    "few",
    "--width",
    "0.0625",
    "--batch-size",
    "8",
    "--threads",
    "1",
    "--seed",
    "5",
]
MODES = {"allreduce": [], "ddp": [], "ps-sync": ["--servers", "1"]}
# What a rank runs first, so that an evaluation leaves batch-norm statistics as they are.
NO_AVERAGE = """
from hvdtrain.job.training import evaluation, step
evaluation.average_buffers = lambda *arguments: None
"""


def train(out, mode, steps, *options, first=""):
    """A job of two workers; its summary."""
    ranks = 3 if MODES[mode] else 2
    words = [*JOB, "--mode", mode, *MODES[mode], "--steps", str(steps), *options, "--out", str(out)]
    job = hvdtrain("train", *words, ranks=ranks, first=first)
    assert job.returncode == 0, job.stdout
    return json.loads((out / "summary.json").read_text())


def sent(summary):
    """Bytes that its processes sent since they began."""
    return sum(row["bytes_sent"] for row in summary["processes"])


def test_one_local_step_is_lockstep(tmp_path):
    """Where the outer step is all of Δ, with plain SGD. Batch-norm statistics are averaged with it."""
    sgd = [*SMOOTH_BATCH_NORM, *"--optimizer sgd --momentum 0 --lr 0.01".split()]
    train(tmp_path / "lockstep", "allreduce", 6, *sgd)
    for mode in MODES:
        one = [*sgd, *"--local-steps 1 --outer-lr 1 --outer-momentum 0".split()]
        train(tmp_path / mode, mode, 6, *one, first=NO_AVERAGE)
        assert_same_weights(tmp_path / mode, tmp_path / "lockstep")


@pytest.mark.parametrize(("mode", "fragments"), [("allreduce", 2), ("ddp", 1), ("ps-sync", 2)])
def test_a_run_goes_on_amid_a_round_with_what_each_worker_had(tmp_path, mode, fragments):
    """It was stopped after 5 steps, of which four made a round. Nothing travels within one but a
    fragment at its half, and the one at its end is taken a step later.
    """
    options = [
        *SMOOTH,
        "--local-steps",
        "4",
        "--fragments",
        str(fragments),
        "--outer-momentum",
        "0.5",
    ]
    of_whole = train(tmp_path / "whole", mode, 12, *options)
    of_first = train(tmp_path / "cut", mode, 5, *options, first=LITTLE)
    of_then = train(tmp_path / "cut", mode, 12, *options, "--resume")
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")
    each = of_first, of_then, of_whole
    one_round = sent(of_then) - sent(of_first)
    begun = one_round / 2 if mode == "ps-sync" else 0  # all take the first weights from the servers
    assert [sent(summary) for summary in each] == [
        begun + rounds * one_round for rounds in (1, 2, 3)
    ]
    assert [summary["rounds"] for summary in each] == [1, 2, 3]
    assert of_whole["peak_bytes_per_step"] == pytest.approx(
        sent(of_whole) / 3 / fragments, rel=1e-4
    )
    lines = (tmp_path / "whole" / "metrics.rank1.jsonl").read_text().splitlines()
    apart = [row["distance"] for row in map(json.loads, lines) if "distance" in row]
    assert len(apart) == 3 * fragments - 1 and 0 < min(apart) <= of_whole["worker_distance"] * 3


# On the second worker, from its third snapshot on.
NO_ROOM = """
import errno
import os
from hvdtrain.job.recording import snapshot
write_parts, calls = snapshot._write_parts, []
def without_room(path, *arguments):
    if path.name == "worker1.safetensors":
        calls.append(path)
    if len(calls) > 2:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write_parts(path, *arguments)
snapshot._write_parts = without_room
"""


def test_a_snapshot_is_there_when_every_workers_part_is_whole(tmp_path):
    """Of three the last was never there, for a worker had no room, and in the one before it a part
    is cut. Three workers go on from the first, of which one is new.
    """
    options = ["--local-steps", "4", "--keep-snapshots", "3"]
    words = [*JOB, "--mode", "ddp", *options, "--schedule", "constant", "--out", str(tmp_path)]
    job = hvdtrain("train", *words, "--steps", "36", ranks=2, first=NO_ROOM)
    assert job.returncode == 0, job.stdout
    assert (
        "the snapshot of step 36 could not be saved: worker 1: No space left on device"
        in job.stdout
    )
    snapshots = sorted((tmp_path / "snapshots").glob("step-*"))
    assert [snapshot.name for snapshot in snapshots] == ["step-00000012", "step-00000024"]
    for snapshot in snapshots:
        parts = [load_file(snapshot / f"worker{worker}.safetensors") for worker in (0, 1)]
        assert {"local.weights", "exp_avg", "exp_avg_sq", "step"} <= set(parts[0]) == set(parts[1])
        assert not torch.equal(parts[0]["exp_avg"], parts[1]["exp_avg"])
    os.truncate(snapshots[1] / "worker1.safetensors", 2**19)
    resumed = hvdtrain("train", *words, "--steps", "40", "--resume", ranks=3)
    assert resumed.returncode == 0, resumed.stdout
    assert (
        f"{snapshots[1]} is damaged, and passed over: worker1.safetensors is not what"
        in resumed.stdout
    )
    assert "going on after step 12" in resumed.stdout


def test_bytes_are_counted_as_they_travel_and_batch_norms_statistics_with_them(tmp_path):
    """Each of two workers sends and receives a vector once where it is averaged: Δ of each round as
    float16, statistics at a round's end and before an evaluation.
    """
    resnet = "--model resnet8 --width 0.25 --local-steps 2 --compression fp16".split()
    summary = train(tmp_path / "run", "allreduce", 6, *resnet)
    weights = load_file(tmp_path / "run" / "snapshots" / "final.safetensors")
    statistics = 4 * sum(tensor.numel() for name, tensor in weights.items() if "running_" in name)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    expected = (
        3 * 2 * manifest["trained_parameters"] + (3 + len(summary["evaluations"])) * statistics
    )
    counted = [(row["bytes_sent"], row["bytes_received"]) for row in summary["processes"]]
    assert counted == [(expected, expected)] * 2
