"""A model that cannot be trained on one sample is refused before training where it would get one."""

import pytest
import torch
from helpers.jobs import hvdtrain
from helpers.own import HEADER, written
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.job.training.lone_samples import check_lone_samples, lone_batch, working_batch

SEVENTEEN = (
    HEADER
    + """
def data():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(20, 12, generator=g)
    y = (x[:, 0] < 0.5).long()
    y[:2], y[17:19] = torch.tensor([0, 1]), torch.tensor([0, 1])
    return TensorDataset(x[:17], y[:17]), TensorDataset(x[17:], y[17:])

def normed(classes):
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))

class Squeezed(nn.Linear):
    def forward(self, x): return super().forward(x).squeeze()
def squeezes(classes): return Squeezed(12, classes)
def plain(classes): return nn.Linear(12, classes)
"""
)


@pytest.mark.parametrize(
    ("batch", "workers", "accumulate", "lone", "works"),
    [
        (16, 1, 1, 1, 15),  # 16 + 1, and 15 + 2
        (15, 1, 1, 0, 15),  # 15 + 2
        (2, 2, 1, 2, 6),  # 6 + 6 + 5: a share of 2 samples at least
        (4, 2, 1, 1, 6),  # 4 + 4 + 4 + 4 + 1
        (4, 1, 4, 4, 9),  # 9 + 8: two samples a pass at least
        (17, 1, 1, 0, 17),
        (16, 10, 1, 16, 0),  # 17 samples are too few for ten workers
    ],
)
def test_what_gets_one_sample_and_a_batch_that_does_not(batch, workers, accumulate, lone, works):
    config = RunConfig(batch_size=batch, accumulate=accumulate)
    assert lone_batch(config, workers, 17) == lone
    assert working_batch(config, [workers], 17) == works


def test_a_short_batch_that_is_never_reached_is_none():
    assert lone_batch(RunConfig(batch_size=16, steps=1), 1, 17) == 0
    assert lone_batch(RunConfig(batch_size=16, steps=2), 1, 17) == 1
    assert lone_batch(RunConfig(batch_size=16, sprint=1.0), 1, 17) == 0


def test_statistics_stay_as_they_are():
    model = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {name: values.clone() for name, values in model.state_dict().items()}
    config = RunConfig(batch_size=16, model="mine.py:build")
    with pytest.raises(
        UsageError, match="--batch-size 16 .*the last of 17 samples are a batch of 1 "
    ):
        check_lone_samples(config, [1], 17, model, torch.rand(1, 12))
    after = model.state_dict()
    assert all(torch.equal(values, before[name]) for name, values in after.items())


@pytest.mark.parametrize(
    ("model", "options", "ranks", "words"),
    [
        ("normed", ["--batch-size", "16"], 1, "Expected more than 1 value per channel"),
        ("normed", ["--batch-size", "2", "--mode", "allreduce"], 2, "a batch of 2 for 2 workers"),
        ("normed", ["--batch-size", "4", "--accumulate", "4"], 1, "in 4 passes each"),
        ("squeezes", ["--batch-size", "16"], 1, "it returns a tensor of shape [2] for one of"),
    ],
)
def test_training_is_refused_before_it_begins(model, options, ranks, words, tmp_path):
    mine = written(tmp_path, SEVENTEEN)
    names = ["--model", f"{mine}:{model}", "--dataset", f"{mine}:data"]
    out = tmp_path / "run"
    done = hvdtrain("train", *names, *options, "--threads", "1", "--out", out, ranks=ranks)
    assert done.returncode == 2, done.stdout
    assert words in done.stdout and not out.exists()
    size = done.stdout.rsplit("take --batch-size ", 1)[1].split()[0]
    again = [*options, "--batch-size", size, "--steps", "4", "--threads", "1"]
    assert hvdtrain("train", *names, *again, "--out", out, ranks=ranks).returncode == 0
    plain = ["--model", f"{mine}:plain", *names[2:], *options, "--steps", "4", "--threads", "1"]
    assert hvdtrain("train", *plain, "--out", tmp_path / "plain", ranks=ranks).returncode == 0


def test_a_comparison_is_refused_before_it_begins(tmp_path):
    mine = written(tmp_path, SEVENTEEN)
    out = tmp_path / "compared"
    done = hvdtrain(
        *["compare", "--model", f"{mine}:normed", "--dataset", f"{mine}:data", "--out", out],
        *["--modes", "allreduce,ps-sync", "--batch-size", "16"],
    )
    assert done.returncode == 2 and "a batch of 1 for 2 workers" in done.stdout, done.stdout
    assert not (out / "runs").exists()
