"""The optimizer's state, as it is saved and restored."""

import pytest
import torch

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.optimizers import (
    make_optimizer,
    put_together,
    restore_state,
    state_of,
)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_restored_state_lies_in_memory_as_its_parameter_does(name):
    """A fused kernel takes elements in the order of memory, and on a GPU refuses state that lies
    otherwise.
    """
    torch.manual_seed(0)
    weights, gradient = (
        torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last) for _ in range(2)
    )
    config = RunConfig(optimizer=name, lr=0.1)

    def step(optimizer, parameter):
        parameter.grad = gradient.clone()
        optimizer.step()

    whole = weights.clone().requires_grad_()
    optimizer = make_optimizer(config, [whole])
    step(optimizer, whole)
    resumed = whole.detach().clone().requires_grad_()
    other = make_optimizer(config, [resumed])
    restore_state(other, [resumed], state_of(optimizer, [whole]))
    step(optimizer, whole)
    step(other, resumed)
    assert torch.equal(whole, resumed)


def test_the_state_of_parts_is_put_together_in_any_order():
    weights = [torch.ones(size, requires_grad=True) for size in (3, 4)]
    optimizer = make_optimizer(RunConfig(optimizer="adam"), weights)
    for number, parameter in enumerate(weights, 1):
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    parts = [(3, state_of(optimizer, weights[1:])), (0, state_of(optimizer, weights[:1]))]
    together, whole = put_together(parts, 7), state_of(optimizer, weights)
    assert together.keys() == whole.keys()
    assert all(torch.equal(together[name], values) for name, values in whole.items())
