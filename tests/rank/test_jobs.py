"""Real jobs under real starters: what a rank finds, what it leaves, and what happens when it goes
wrong.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from helpers.jobs import (
    SETTINGS,
    SMALL,
    check_run_folder,
    family,
    finish,
    hvdtrain,
    kill,
    make_images,
    run,
    start,
    steps,
    until,
)
from safetensors.torch import load_file, save_file

from hvdtrain.base.system.parent import is_alive
from hvdtrain.reporting.explaining.step_picture import one_step, read_slices
from hvdtrain.reporting.plot_style import svg
from hvdtrain.runs.read import load_run

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("beside_digits")]


STATE_TOLD = """
from hvdtrain.job.rings.ring import Ring
refresh = Ring.refresh
def told(self):
    refresh(self)
    states = [state for lane in self.exchange.lanes for state in lane.optimizer.state.values()]
    held = sum(tensor.nbytes for state in states for tensor in state.values() if tensor.dim())
    (self.job.folder / f"held.{self.world.rank}").write_text(str(held))
Ring.refresh = told
"""


def test_four_ranks_of_sharded_share_out_the_state_that_each_of_allreduce_has(tmp_path):
    def held(mode, ranks):
        out = tmp_path / mode
        done = hvdtrain(
            "train", "--mode", mode, *SMALL, "--out", out, ranks=ranks, first=STATE_TOLD
        )
        assert done.returncode == 0, done.stdout
        return [int((out / f"held.{rank}").read_text()) for rank in range(ranks)]

    parts, [whole] = held("sharded", 4), held("allreduce", 1)
    # a bucket's first shards have one element more
    assert sum(parts) == whole and max(parts) < 0.26 * whole


@pytest.mark.parametrize(
    ("starter", "ranks", "mode", "servers"),
    [
        ("forked", 1, "allreduce", 0),
        ("forked", 2, "allreduce", 0),
        ("forked", 2, "ddp", 0),
        ("forked", 4, "ps-async", 2),
    ],
)
def test_every_starter_runs_every_kind_of_mode(starter, ranks, mode, servers, tmp_path):
    """Beside those whose commands are in the README, which test_readme.py looks at in the same way."""
    out = tmp_path / "run"
    done = run(
        starter,
        ranks,
        "--mode",
        mode,
        "--servers",
        str(servers),
        *SMALL,
        "--shares",
        "equal",
        "--out",
        str(out),
        "--trace",
    )
    assert done.returncode == 0, done.stdout
    check_run_folder(out, mode, ranks - servers, servers, 6)
    slices, _ = read_slices(out)
    for rank in range(servers, ranks):
        rows = steps(out, rank)
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and {
            row.get("shares", 1) for row in rows
        } == {1}
        assert_every_second_has_its_part(rows)
        own = [s for s in slices if s.process == f"rank {rank} (worker)"]
        assert sum(s.name == "forward" for s in own) == 6
        updating = sum(s.ended - s.began for s in own if s.name == "optimizer")
        assert updating == pytest.approx(sum(row["optimizer_s"] for row in rows), rel=0.1, abs=0.01)
        if servers:  # before a layer's forward, and after backward
            waited = sum(s.ended - s.began for s in own if s.name == "comm")
            assert waited == pytest.approx(sum(row["comm_s"] for row in rows), rel=0.1, abs=0.01)
        elif ranks > 1:
            forwards = [s.began for s in own if s.name == "forward"]
            reductions = [s for s in own if s.track.startswith("all-reduce")]
            per_step = np.bincount(
                np.searchsorted(forwards, [s.ended for s in reductions]) - 1, minlength=6
            )
            assert len(per_step) == 6 and per_step.all(), reductions
    by_flow = [[s for s in slices if s.flow == flow] for flow in {s.flow for s in slices} - {0}]
    assert len(by_flow) >= (2 * 6 if servers else 0)
    for flow in by_flow:
        assert [s.name.split()[0] for s in sorted(flow, key=lambda s: s.began)] == [
            "push",
            "apply",
            "pull",
        ]
    drawn = svg(one_step({mode: out}))
    assert re.search(rf"{mode}: step [1-6] of rank {servers}", drawn)
    assert ("arrows: a bucket's way to its server and back" in drawn) == (servers > 0)
    finished = load_run(out)
    answers = np.unpackbits(
        np.fromfile(out / "answers.bin", np.uint8), count=finished.manifest.validation_samples
    )
    assert answers.mean() == pytest.approx(finished.summary.val_accuracy)


def test_a_rank_does_not_import_torchs_compiler(tmp_path):
    """That takes as long as importing torch. Torch does it for tensors without numbers, and for its
    optimizers.
    """
    code = """
import os, sys
end = os._exit
os._exit = lambda code: end(100 if "torch._dynamo" in sys.modules else code)
from hvdtrain.cli import main
main()
"""
    words = ["train", *SMALL, "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", code, *words], **SETTINGS, timeout=120)
    assert done.returncode == 0, done.stdout


def assert_every_second_has_its_part(rows):
    """A step's time is taken when its last part ended, before writing it down does, which the next
    step counts.
    """
    ended = np.cumsum(
        [sum(value for name, value in row.items() if name.endswith("_s")) for row in rows]
    )
    times = np.array([row["time"] for row in rows])
    assert (ended <= times + 1e-3).all() and (times[:-1] <= ended[1:] + 1e-3).all(), (ended, times)


def test_a_run_can_be_repeated_from_its_configuration_to_the_same_bits_or_for_another_length(
    tmp_path,
):
    first, again, longer = (tmp_path / name for name in ("first", "again", "longer"))
    options = [*SMALL, "--seed", "3", "--deterministic", "--schedule", "cosine"]
    assert run("forked", 1, *options, "--out", str(first)).returncode == 0
    same = ["--config", str(first / "config.toml"), "--out"]
    assert run("forked", 1, *same, str(again)).returncode == 0
    name = Path("snapshots") / "final.safetensors"
    assert (first / name).read_bytes() == (again / name).read_bytes()
    options = ["--time-budget", "1s", "--repeat", "2", "--trace", "--trace-steps", "90000-90009"]
    done = run("forked", 1, *same, str(longer), *options)
    assert done.returncode == 0
    assert "no step was traced: none of --trace-steps 90000-90009 was taken" in done.stdout
    before, after = (json.loads((out / "manifest.json").read_text()) for out in (first, longer))
    assert (before["schedule"], after["schedule"]) == ("cosine over 6 steps", "constant")
    assert (before["repeat"], after["repeat"]) == (1, 2)


def test_every_worker_starts_from_pretrained_weights_and_statistics(tmp_path):
    """The job itself checks that all workers start from the same tensors; here: from those of the
    file.
    """
    given = tmp_path / "given"
    options = ["--model", "vgg11_bn", *SMALL, "--steps", "1"]
    assert run("forked", 1, *options, "--out", str(given)).returncode == 0
    file = tmp_path / "given.safetensors"
    weights = load_file(given / "snapshots" / "final.safetensors")
    weights |= {
        name: tensor + 5 for name, tensor in weights.items() if name.endswith("running_mean")
    }
    save_file(weights, file)
    for mode, servers in (("allreduce", 0), ("ps-sync", 1)):
        out = tmp_path / mode
        job = ["--mode", mode, "--servers", str(servers), *options, "--lr", "1e-20"]
        done = run("forked", 2 + servers, *job, "--pretrained", str(file), "--out", str(out))
        assert done.returncode == 0, done.stdout
        final = load_file(out / "snapshots" / "final.safetensors")
        for name in (name for name in weights if name.endswith("weight")):
            assert torch.allclose(final[name], weights[name]), name
        # One step mixes in a tenth of the batch's own mean. A worker that began with means of 0
        # would pull the average.
        for name in (name for name in weights if name.endswith("running_mean")):
            assert final[name].mean() > 4, name


@pytest.mark.parametrize("starter", ["mpirun", "horovodrun"])
def test_ranks_end_when_their_starter_is_killed(starter, tmp_path):
    out = tmp_path / "run"
    job = start(
        starter,
        2,
        "--mode",
        "allreduce",
        "--width",
        "0.0625",
        "--epochs",
        "1000",
        "--out",
        str(out),
    )
    everyone = []
    try:
        until(lambda: (out / "metrics.rank0.jsonl").is_file())
        everyone = family(job)
        job.send_signal(signal.SIGKILL)
        psutil.wait_procs(everyone, timeout=30)
        assert not [p for p in everyone if is_alive(p)]
    finally:
        kill(everyone)
        finish(job)
    assert len(everyone) >= 2


def test_a_rank_that_raises_says_so_in_one_line_and_the_log_has_the_traceback(tmp_path):
    """An image that cannot be decoded is found when the work has begun."""
    data, out = tmp_path / "data", tmp_path / "run"
    make_images(data, train=8, validation=8, side=32)
    (data / "TrainData" / "b" / "5.png").write_bytes(b"not an image")
    done = run(
        "forked",
        2,
        "--mode",
        "allreduce",
        "--dataset",
        str(data),
        "--batch-size",
        "4",
        "--out",
        str(out),
    )
    assert done.returncode == 1
    assert re.search(
        r"^hvdtrain: rank \d failed: .*5\.png.* \(see .*rank\.\d\.err\)$", done.stdout, re.MULTILINE
    )
    assert "Traceback" not in done.stdout
    assert "Traceback" in "".join(path.read_text() for path in (out / "logs").glob("*.err"))
    assert not (out / "summary.json").exists()
