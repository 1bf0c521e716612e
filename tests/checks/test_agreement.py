"""The tolerance of comparisons of trained weights: another processor's rounding is within, what is
wrong is not.
"""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.optimizers import make_optimizer
from hvdtrain.tools.checks.agreement import TOLERANCE, distance, flat
from hvdtrain.tools.checks.smooth import vgg

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, BATCH, SIDE, CLASSES = 6, 32, 32, 10
ROUNDING = 2**-22  # of what a layer adds up, where another processor takes another order


def initial():
    torch.manual_seed(0)
    return vgg(CLASSES)


def trained(optimizer, passes=1, rounding=0.0, change=lambda named: None):
    """The weights of a short training, as one vector.

    Args:
        rounding: what each layer's output and each gradient is off by, at random, as a part of it.
        change: what is done to parameters by name when they have their gradients.
    """
    model, numbers = initial(), torch.Generator().manual_seed(1)

    def rounded(values):
        return values * (1 + rounding * torch.randn(values.shape, generator=numbers))

    if rounding:
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.register_forward_hook(lambda layer, given, output: rounded(output))
    data = torch.Generator().manual_seed(2)
    taking = make_optimizer(
        RunConfig(optimizer=optimizer, lr=0.01 if optimizer == "sgd" else 1e-3), model.parameters()
    )
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, SIDE, SIDE, generator=data)
        labels = torch.randint(CLASSES, (BATCH,), generator=data)
        for some, theirs in zip(images.chunk(passes), labels.chunk(passes), strict=True):
            (F.cross_entropy(model(some), theirs) * len(some) / BATCH).backward()
        if rounding:
            for p in model.parameters():
                p.grad.copy_(rounded(p.grad))
        change(dict(model.named_parameters()))
        taking.step()
        taking.zero_grad()
    return as_vector(model)


def as_vector(model):
    named = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return flat(named, named)


@functools.cache
def reference(optimizer):
    return trained(optimizer)


def apart(optimizer, **changed):
    weights = trained(optimizer, **changed)
    return distance(weights, reference(optimizer), as_vector(initial()), optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "changed",
    [{"passes": 16}, {"passes": 32}, {"rounding": ROUNDING}],
    ids=["16 passes", "32 passes", "rounding"],
)
def test_what_rounding_leaves_is_well_within_the_tolerance(optimizer, changed):
    assert 0 < apart(optimizer, **changed) < TOLERANCE / 3


def test_a_few_weights_that_adam_moves_at_random_are_within_and_more_are_not():
    reference = np.ones(10_000)
    few, more = reference.copy(), reference.copy()
    few[:10] = -1.0
    more[:11] = -1.0
    start = np.zeros(10_000)
    assert distance(few, reference, start, "adam") == 0
    assert distance(more, reference, start, "adam") > 3 * TOLERANCE
    assert distance(few, reference, start, "sgd") > 3 * TOLERANCE


def test_a_gradient_that_is_off_by_a_part_in_a_thousand_is_found():
    def of_all(named):
        for p in named.values():
            p.grad *= 1.001

    assert apart("sgd", change=of_all) > 3 * TOLERANCE


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_step_whose_gradient_is_missing_in_one_layer_is_found(optimizer):
    def of_one(named):
        named["features.12.weight"].grad.zero_()

    assert apart(optimizer, change=of_one) > 3 * TOLERANCE
