"""Computing in 16 bits: what fp16's loss scale does, and that every mode trains so."""

import json

import pytest
import torch
from helpers.jobs import final_weights, steps

from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.numerics.optimizers import make_optimizer
from hvdtrain.numerics.precision import LossScale
from hvdtrain.runs.request import check

CPU = torch.device("cpu")
FP16 = RunConfig(precision="fp16", optimizer="sgd", momentum=0.9, lr=0.1)


def test_an_overflow_leaves_weights_and_momentum_alone_and_halves_the_scale():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scale = make_optimizer(FP16, [weight]), LossScale("fp16", [weight], CPU)
    before = scale.scaled(torch.ones(())).item()
    scale.scaled((2 * weight).sum()).backward()
    weight.grad[0] = torch.inf
    scale.step(optimizer.step)
    assert not scale.acted
    assert scale.scaled(torch.ones(())).item() == before / 2
    assert weight.tolist() == [1, 1, 1, 1]
    # The optimizer's first step: torch's own way would now use a momentum that was never written.
    optimizer.zero_grad()
    scale.scaled((2 * weight).sum()).backward()
    scale.step(optimizer.step)
    assert scale.acted
    assert weight.tolist() == pytest.approx([0.8] * 4)


def test_the_scale_goes_on_where_it_was():
    first, second = (LossScale("fp16", [torch.nn.Parameter(torch.ones(1))], CPU) for _ in range(2))
    state = first.state() | {"scale": 1024.0}
    second.restore(state)
    assert second.scaled(torch.ones(())).item() == 1024
    assert json.loads(json.dumps(second.state())) == state


def test_without_fp16_nothing_is_scaled_or_left_out():
    weight = torch.nn.Parameter(torch.ones(1))
    scale = LossScale("fp32", [weight], CPU)
    assert scale.scaled(torch.ones(())).item() == 1
    weight.grad = torch.full((1,), torch.nan)
    scale.step(lambda: None)
    assert scale.acted
    assert scale.state() == {}
    scale.restore({"scale": 2.0})


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "modes",
    [
        [(1, ["single"]), (2, ["ps-sync", "--servers", "1"])],
        [(2, ["allreduce"]), (2, ["ddp"]), (3, ["ps-sync", "--servers", "1"])],
    ],
)
def test_float16_gives_the_same_weights_in_every_synchronous_mode(modes, tmp_path):
    """The scale falls from 65,536 until gradients fit: some of these steps are left out, everywhere the same ones.

    Not the same with one worker as with two: each has the mean of fewer samples, which may be too large for fp16.
    """
    options = ["--precision", "fp16", "--optimizer", "sgd", "--lr", "0.01", "--deterministic"]
    first, *others = [
        final_weights("forked", ranks, tmp_path / mode[0], *options, "--mode", *mode) for ranks, mode in modes
    ]
    rows = steps(tmp_path / modes[0][1][0], 0)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[0]["left_out"] and not rows[-1]["left_out"]
    summary = json.loads((tmp_path / modes[0][1][0] / "summary.json").read_text())
    assert summary["left_out_share"] == sum(row["left_out"] for row in rows) / len(rows)
    for other in others:
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)


def test_float16_trains_with_an_asynchronous_server_and_bytes_of_left_out_steps_are_not_sent(tmp_path):
    final_weights("forked", 3, tmp_path / "run", "--mode", "ps-async", "--servers", "1", "--precision", "fp16")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    rows = [row for rank in (1, 2) for row in steps(tmp_path / "run", rank)]
    shares = sum(row["shares"] for row in rows)  # each a step of its worker
    sent = shares - sum(row.get("left_out", 0) for row in rows)  # a line without a share has none
    assert 0 < sent < shares and 0 < summary["left_out_share"] < 1 and summary["val_loss"] < 10
    # Besides, weights come back in each step, and each worker reads them before its first one and after its last.
    moved = 4 * manifest["trained_parameters"] * (sent + shares + 2 * 2)
    assert summary["bytes_sent_per_step"] == pytest.approx(moved / summary["steps"], rel=0.01)


def test_a_recorded_run_cannot_be_float16():
    with pytest.raises(UsageError, match="--record is not for --precision fp16, --compile"):
        check(RunConfig(mode="ps-async", servers=1, record=True, precision="fp16", snapshot_every="never"))
