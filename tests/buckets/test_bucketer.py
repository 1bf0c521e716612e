"""Gradients that come together in buckets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvdtrain.buckets.bucketer import Bucketer
from hvdtrain.buckets.partition import cut

pytestmark = pytest.mark.usefixtures("one_thread")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 60), st.data())
def test_each_step_hands_over_each_bucket_once_in_whatever_order_its_gradients_come(sizes, servers, most, data):
    pieces, found = cut(sizes, servers, most), {}

    def complete(number, gradient):
        assert number not in found
        found[number] = gradient.clone()

    bucketer = Bucketer(sizes, pieces, complete)
    for step in (1, 2):
        flat = torch.arange(float(sum(sizes))) * step
        parts = flat.split(sizes)
        for parameter in data.draw(st.permutations(range(len(sizes)))):
            assert not set(bucketer.of_parameter[parameter]) & set(found)
            bucketer.put(parameter, parts[parameter].view(1, -1))
        assert torch.cat([found.pop(number) for number in range(len(pieces))]).equal(flat)


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_are_taken_from_the_last_backward_pass_of_a_step(keep):
    model, found = nn.Linear(3, 1, bias=False), []
    bucketer = Bucketer([3], cut([3], 1, 3), lambda number, gradient: found.append(gradient.clone()))
    bucketer.take_from([model.weight], keep)
    for accumulating in (True, False):
        bucketer.accumulating = accumulating
        model(torch.ones(1, 3)).sum().backward()
    assert [gradient.tolist() for gradient in found] == [[2, 2, 2]]
    assert (model.weight.grad is not None) == keep
