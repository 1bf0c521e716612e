"""Real jobs whose workers take several steps between two exchanges."""

import json

import pytest
import torch
from helpers.jobs import hvdtrain
from safetensors.torch import load_file

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("beside_few_digits")]

JOB = ["--dataset", "few", "--width", "0.0625", "--batch-size", "8", "--threads", "1", "--seed", "5"]
MODES = {"allreduce": [], "ddp": [], "ps-sync": ["--servers", "1"]}
# What a rank runs first, so that an evaluation leaves batch-norm statistics as they are.
NO_AVERAGE = """
from hvdtrain.training import evaluation, step
evaluation.average_buffers = lambda *arguments: None
"""


def train(out, mode, steps, *options, first=""):
    """A job of two workers; its final weights, and its summary."""
    ranks = 3 if MODES[mode] else 2
    lasts = "--steps", str(steps), "--schedule", "constant"
    words = [*JOB, "--mode", mode, *MODES[mode], *lasts, *options, "--out", str(out)]
    job = hvdtrain("train", *words, ranks=ranks, first=first)
    assert job.returncode == 0, job.stdout
    summary = json.loads((out / "summary.json").read_text())
    return load_file(out / "snapshots" / "final.safetensors"), summary


def sent(summary):
    """Bytes that its processes sent since they began."""
    return sum(row["bytes_sent"] for row in summary["processes"])


def assert_near(some, others, most):
    assert max((some[name] - others[name]).abs().max().item() for name in some) <= most


def test_one_local_step_is_lockstep(tmp_path):
    """Where the outer step is all of Δ, with plain SGD. Batch-norm statistics are averaged with it."""
    sgd = "--model resnet8 --width 0.25 --optimizer sgd --momentum 0 --lr 0.001".split()
    expected, _ = train(tmp_path / "lockstep", "allreduce", 6, *sgd)
    for mode in MODES:
        one = [*sgd, *"--local-steps 1 --outer-lr 1 --outer-momentum 0".split()]
        weights, _ = train(tmp_path / mode, mode, 6, *one, first=NO_AVERAGE)
        assert_near(weights, expected, 1e-5)


@pytest.mark.parametrize(("mode", "fragments"), [("allreduce", 1), ("allreduce", 2), ("ddp", 2), ("ps-sync", 2)])
def test_a_run_goes_on_amid_a_round_with_what_each_worker_had(tmp_path, mode, fragments):
    """It was stopped after 5 steps, of which four made a round. Nothing travels within one but a fragment at its half,
    and the one at its end is taken a step later.
    """
    options = ["--local-steps", "4", "--fragments", str(fragments), "--outer-momentum", "0.5"]
    whole, of_whole = train(tmp_path / "whole", mode, 12, *options)
    first, of_first = train(tmp_path / "cut", mode, 5, *options)
    resumed, of_then = train(tmp_path / "cut", mode, 12, *options, "--resume")
    assert_near(resumed, whole, 1e-6)
    each = of_first, of_then, of_whole
    one_round = sent(of_then) - sent(of_first)
    begun = one_round / 2 if mode == "ps-sync" else 0  # all take the first weights from the servers
    assert [sent(summary) for summary in each] == [begun + rounds * one_round for rounds in (1, 2, 3)]
    assert [summary["rounds"] for summary in each] == [1, 2, 3]
    assert of_whole["peak_bytes_per_step"] == pytest.approx(sent(of_whole) / 3 / fragments, rel=1e-4)
    lines = (tmp_path / "whole" / "metrics.rank1.jsonl").read_text().splitlines()
    apart = [row["distance"] for row in map(json.loads, lines) if "distance" in row]
    assert len(apart) == 3 * fragments - 1 and 0 < min(apart) <= of_whole["worker_distance"] * 3
    assert not torch.equal(first["classifier.0.weight"], whole["classifier.0.weight"])
