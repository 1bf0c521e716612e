"""Options that change how a step is computed: what they promise, in every kind of mode."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers.jobs import JOB, final_weights, hvdtrain, make_images, run, started, steps, until
from helpers.weights import SMOOTH, SMOOTH_CNN, assert_same_weights

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.optimizers import lr_at

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("beside_digits")]
SERVED = ["ps-sync", "--servers", "1"]


SGD = [*SMOOTH, "--optimizer", "sgd", "--lr", "0.01"]


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Six steps of SGD, each in one pass. Not to be changed."""
    out = tmp_path_factory.mktemp("once") / "run"
    final_weights("forked", 1, out, *SGD)
    return out


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The weights that a run begins with, and their file."""
    out = tmp_path_factory.mktemp("begun") / "run"
    return final_weights("forked", 1, out, "--lr", "1e-12"), str(
        out / "snapshots" / "final.safetensors"
    )


@pytest.mark.xdist_group("accumulated")  # beside one run, which one process makes
@pytest.mark.parametrize(("ranks", "mode"), [(2, ["allreduce"]), (2, ["ddp"]), (3, SERVED)])
def test_accumulated_passes_give_the_step_of_one(ranks, mode, once, tmp_path):
    final_weights("forked", ranks, tmp_path / "several", *SGD, "--accumulate", "3", "--mode", *mode)
    assert_same_weights(tmp_path / "several", once)
    assert len(steps(tmp_path / "several", int("ps-sync" in mode))) == 6


# What a rank runs first: torch's hook of PowerSGD waits for tensors on a CPU as on a GPU, where it
# sees one.
SEES_NO_GPU = """
import os
from hvdtrain.job.rank import prepare as preparing
prepare = preparing.prepare
def checked(*arguments):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    return prepare(*arguments)
preparing.prepare = checked
"""


def test_powersgd_sends_little_after_a_tenth_of_the_steps_and_learns(tmp_path):
    options = ["--device", "cpu", "--steps", "40", "--compression", "powersgd", "--log-every", "8"]
    words = ["train", *JOB, "--mode", "ddp", *options, "--out", str(tmp_path)]
    done = hvdtrain(*words, ranks=2, first=SEES_NO_GPU)
    assert done.returncode == 0, done.stdout
    progress = [
        line for line in done.stdout.splitlines() if "samples/s" in line and "val" not in line
    ]
    assert sum("accuracy" in line for line in progress) == 5
    summary, manifest = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("summary", "manifest")
    )
    sent = summary["processes"][0]["bytes_sent"] / (4 * manifest["parameters"] * 40)
    assert 0.1 < sent < 0.2
    losses = [row["loss"] for row in steps(tmp_path, 0)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


POWERSGD = [*SMOOTH, *"--mode ddp --compression powersgd --snapshot-every epoch".split()]


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory):
    """Eight steps with PowerSGD. Not to be changed."""
    out = tmp_path_factory.mktemp("unstopped") / "run"
    final_weights("forked", 2, out, *POWERSGD, "--steps", "8")
    return out


@pytest.mark.xdist_group("powersgd")
@pytest.mark.parametrize("stopped", [1, 4])  # before PowerSGD begins, and after
def test_powersgd_goes_on_after_a_snapshot_as_if_it_had_not_stopped(stopped, unstopped, tmp_path):
    final_weights("forked", 2, tmp_path / "cut", *POWERSGD, "--steps", str(stopped))
    final_weights("forked", 2, tmp_path / "cut", *POWERSGD, "--steps", "8", "--resume")
    assert_same_weights(tmp_path / "cut", unstopped)


@pytest.mark.parametrize(("codec", "ranks"), [("topk:0.02", 3), ("2bit:0.005", 2)])
def test_what_a_codec_left_out_goes_on_after_a_snapshot_as_if_it_had_not_stopped(
    codec, ranks, tmp_path
):
    options = [*SMOOTH, "--mode", *SERVED, "--compression", codec, "--snapshot-every", "epoch"]
    final_weights("forked", ranks, tmp_path / "whole", *options, "--steps", "8")
    final_weights("forked", ranks, tmp_path / "cut", *options, "--steps", "4")
    final_weights("forked", ranks, tmp_path / "cut", *options, "--steps", "8", "--resume")
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.xdist_group("frozen")  # from one run, which one process makes
@pytest.mark.parametrize(
    ("ranks", "mode"), [(2, ["allreduce"]), (3, ["ps-async", "--servers", "1"])]
)
def test_frozen_features_stay_and_the_head_learns(ranks, mode, begun, tmp_path):
    before, file = begun
    options = ["--lr", "0.01", "--mode", *mode]
    after = final_weights(
        "forked", ranks, tmp_path / "after", "--freeze", "features", "--pretrained", file, *options
    )
    for name, tensor in after.items():
        moved = (tensor - before[name]).abs().max().item()
        assert moved < 1e-9 if name.startswith("features") else moved > 1e-3, name
    manifest = json.loads((tmp_path / "after" / "manifest.json").read_text())
    head = sum(t.numel() for name, t in after.items() if not name.startswith("features"))
    assert manifest["trained_parameters"] == head < manifest["parameters"]


def test_bfloat16_learns_as_float32_does(tmp_path):
    longer = ["--dataset", "digits", "--steps", "46", "--batch-size", "32"]
    losses = []
    for precision, ranks, mode in (
        ("fp32", 1, ["single"]),
        ("bf16", 1, ["single"]),
        ("bf16", 2, SERVED),
    ):
        out = tmp_path / f"{precision}-{ranks}"
        final_weights("forked", ranks, out, *longer, "--precision", precision, "--mode", *mode)
        losses.append(json.loads((out / "summary.json").read_text())["val_loss"])
    assert losses[1] != losses[0]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.05)


@pytest.mark.main_job
@pytest.mark.timeout(300)
def test_a_compiled_model_learns_the_same_and_its_compiling_is_not_training(tmp_path, monkeypatch):
    # In its cache torch finds code that was compiled for other vector units, if they are told by
    # ATEN_CPU_CAPABILITY.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    # a batch an epoch: one shape to compile
    make_images(tmp_path / "data", train=16, validation=8, side=32)
    options = [*SMOOTH_CNN, "--dataset", str(tmp_path / "data")]
    final_weights("forked", 1, tmp_path / "plain", *options)
    began = time.monotonic()
    final_weights("forked", 2, tmp_path / "compiled", *options, "--mode", *SERVED, "--compile")
    took_s = time.monotonic() - began  # most of it to compile, however busy the machine is
    assert_same_weights(tmp_path / "compiled", tmp_path / "plain")
    trained_s = json.loads((tmp_path / "compiled" / "summary.json").read_text())["wall_s"]
    assert trained_s < took_s / 4


def catches_sigterm(pid):
    caught = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigCgt")
    )
    return int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1


# Is asked for its version, as g++, and takes a minute for all else.
SLOW_COMPILER = """#!/bin/sh
case "$*" in *-v*) exec g++ "$@";; esac
exec sleep 60
"""


def test_compiling_needs_a_compiler_and_sigterm_does_not_wait_for_it(tmp_path):
    compiler = tmp_path / "slow-g++"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    options = [*JOB, "--steps", "100000", "--compile", "--out", str(tmp_path / "run")]
    without = hvdtrain("train", *options, env={"CXX": "nosuch"})
    assert without.returncode == 2 and "--compile needs a C++ compiler" in without.stdout
    with started("forked", 1, *options, env={"CXX": str(compiler)}) as job:
        until(lambda: (tmp_path / "run" / "manifest.json").is_file())
        until(lambda: catches_sigterm(job.ranks()[0].pid))
        job.send_signal(signal.SIGTERM)
        assert job.wait(40) == 143


def test_the_learning_rate_steps_down_by_epoch():
    config = RunConfig(lr=0.1, schedule="step", step_epochs=2, step_factor=0.5, warmup=2)
    rates = [
        lr_at(config, step, epoch, None) for step, epoch in [(1, 1), (2, 1), (3, 2), (5, 3), (9, 5)]
    ]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05, 0.025])


def test_the_learning_rate_by_itself_does_not_hang_on_how_many_steps_there_will_be():
    for total in (20, 99):
        rates = [lr_at(RunConfig(lr=0.1, steps=total), step, 1, total) for step in (1, 5, 50, 60)]
        assert rates == pytest.approx([0.002, 0.01, 0.1, 0.1])


@pytest.mark.parametrize(
    ("save", "has_test", "kept"),
    [("none", True, set()), ("best", False, {"best"}), ("final", False, {"final"})],
)
def test_only_the_models_that_are_wanted_are_kept(save, has_test, kept, tmp_path):
    make_images(tmp_path / "data", 4, 2, 28)
    if has_test:
        shutil.copytree(tmp_path / "data" / "ValidationData", tmp_path / "data" / "TestData")
    options = [
        "--model",
        "cnn",
        "--width",
        "0.1",
        "--dataset",
        str(tmp_path / "data"),
        "--image-size",
        "28",
    ]
    options += ["--steps", "1", "--batch-size", "4", "--snapshot-every", "never", "--save", save]
    done = run("forked", 1, *options, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout
    assert {file.stem for file in (tmp_path / "run" / "snapshots").glob("*")} == kept
    # The best model is there until test images are tested with it.
    assert ("test_loss" in json.loads((tmp_path / "run" / "summary.json").read_text())) == has_test


@pytest.mark.parametrize(("scaling", "lr"), [("none", 0.1), ("sqrt", 0.2), ("linear", 0.4)])
def test_a_batch_for_each_worker_and_its_learning_rate(scaling, lr):
    config = RunConfig(batch_size=16, per_worker=True, lr=0.1, lr_scaling=scaling).for_workers(4)
    assert (config.batch_size, config.lr, config.per_worker) == (64, pytest.approx(lr), False)
    assert config.for_workers(2) == config
