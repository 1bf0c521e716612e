"""Batch norm's statistics: one mean on all workers, by what carries their gradients."""

import pytest
import torch
from helpers.jobs import LITTLE, hvdtrain

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("beside_digits")]

# 5,504 bytes of statistics: more than LITTLE lets through the store.
JOB = "--dataset few --model resnet20 --batch-size 8 --threads 1 --seed 5 --steps 5 --snapshot-every never".split()
LOCAL = ["--local-steps", "2"]


def noted(folder):
    """What a rank runs first, so that it writes down the model's buffers before an evaluation and
    in it.
    """
    return f"""
import os
import torch
from hvdtrain.job.training import evaluation
average_buffers = evaluation.average_buffers
def noted(model, *arguments):
    before = {{name: buffer.clone() for name, buffer in model.named_buffers()}}
    average_buffers(model, *arguments)
    torch.save([before, dict(model.named_buffers())], "{folder}/" + os.environ["RANK"])
evaluation.average_buffers = noted
"""


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        (2, ["allreduce", *LOCAL]),
        (2, ["sharded"]),
        (2, ["ddp", *LOCAL]),
        (3, ["ps-sync", "--servers", "1"]),
    ],
)
def test_all_workers_evaluate_one_mean_that_does_not_go_through_the_store(ranks, mode, tmp_path):
    (tmp_path / "buffers").mkdir()
    words = [*JOB, "--mode", *mode, "--out", str(tmp_path / "run")]
    job = hvdtrain("train", *words, ranks=ranks, first=noted(tmp_path / "buffers") + LITTLE)
    assert job.returncode == 0, job.stdout
    (one, after), (other, after_other) = (
        torch.load(file) for file in (tmp_path / "buffers").iterdir()
    )
    tracked = [name for name in one if name.endswith("num_batches_tracked")]
    assert tracked and len(one) == 3 * len(tracked)
    for name, buffer in after.items():
        assert torch.equal(buffer, after_other[name])
        if name in tracked:
            assert (buffer.dtype, buffer.item()) == (torch.int64, 5)
        else:
            torch.testing.assert_close(buffer, (one[name] + other[name]) / 2)
    assert any(not torch.equal(one[name], other[name]) for name in one)
