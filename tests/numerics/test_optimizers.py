"""Optimizers on a flat tensor, as a server's bucket is: the same as torch's own, and as many as torch has."""

import numpy as np
import pytest
import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.numerics.optimizers import OPTIMIZERS, OptimizerSpec, make_optimizer

# Those that are there, and some that could be added by a line: with and without a fused kernel.
NAMES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam"]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_torchs_own(name, monkeypatch):
    rng = np.random.default_rng(1)
    known = {spec.name: key for key, spec in OPTIMIZERS.items()}
    monkeypatch.setitem(OPTIMIZERS, "added", OptimizerSpec(name, 2))
    config = RunConfig(optimizer=known.get(name, "added"), lr=0.05, weight_decay=0.01, momentum=0.9)
    weights = torch.from_numpy(rng.normal(size=200).astype("float32"))
    ours, theirs = weights.clone(), weights.clone()
    optimizer = make_optimizer(config, [ours])
    options = {"momentum": 0.9} if name == "SGD" else {}
    reference = getattr(torch.optim, name)([theirs], lr=0.05, weight_decay=0.01, **options)
    for _ in range(4):
        ours.grad = torch.from_numpy(rng.normal(size=200).astype("float32"))
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)
    assert not ours.equal(weights)
