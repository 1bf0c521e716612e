"""Gradients that come together in buckets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.futures import Future
from torch.utils.checkpoint import checkpoint

from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.flat import flatten_weights
from hvdtrain.job.buckets.exchange import Bucketer, Exchange, Lane
from hvdtrain.job.buckets.partition import cut

pytestmark = pytest.mark.usefixtures("one_thread")


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 60),
    st.data(),
)
def test_each_step_hands_over_each_bucket_once_in_whatever_order_its_gradients_come(
    sizes, servers, most, data
):
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


class HeldLane(Lane):
    """What is sent comes back when the test says so."""

    def send(self, gradient):
        self.sent = gradient.clone()
        self.answer = Future()
        return self.answer

    def take(self, weights):
        self.weights.copy_(weights)


@pytest.fixture
def exchange():
    """Of a model of two layers, which are a bucket each."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    weights = flatten_weights(model)
    lanes = [
        HeldLane(number, piece, weights, None) for number, piece in enumerate(cut([6, 6], 1, 6))
    ]
    made = Exchange(lanes, [6, 6], weights, None, room=48, patience=0.1)
    made.attach(model, by_layer=True)
    return model, made


def test_gradients_are_taken_from_the_last_backward_pass_of_a_step(exchange):
    model, made = exchange
    reached = (model[0].weight.detach() @ torch.ones(2)).expand(2, 3)
    for accumulating in (True, False):
        made.bucketer.accumulating = accumulating
        model(torch.ones(1, 2)).sum().backward()
    for lane, layer in zip(made.lanes, model, strict=True):
        assert lane.sent.shape == (6,) and layer.weight.grad is None
    assert made.lanes[1].sent.equal(2 * reached.reshape(-1))


def test_each_layer_waits_for_its_own_weights_alone(exchange):
    model, made = exchange
    model(torch.ones(1, 2)).sum().backward()
    made.lanes[0].answer.set_result(torch.ones(6))
    assert model[0](torch.ones(1, 2)).tolist() == [[2, 2, 2]]
    told = []

    def tell(line):
        told.append(line)
        if len(told) == 2:
            made.lanes[1].answer.set_result(torch.ones(6))

    made.tell = tell
    assert model[1](torch.ones(1, 3)).tolist() == [[3, 3]]
    late = "waiting for ranks that have not sent 1 of 2 buckets of gradients, 1 among them, alive, for 1 min"
    assert told == [late] * 2


def test_what_goes_wrong_on_the_way_is_raised_where_weights_are_waited_for(exchange):
    model, made = exchange
    model(torch.ones(1, 2)).sum().backward()
    made.lanes[1].answer.set_exception(RuntimeError("the ring is broken"))
    with pytest.raises(Failure, match="the ring is broken"):
        made.wait_for_all()


class Skipping(nn.Module):
    """Two layers, of which a forward leaves out those that it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, without=()):
        for name in ("first", "second"):
            x = x if name in without else getattr(self, name)(x)
        return x


@pytest.fixture(params=[6, 100], ids=["a bucket each", "one bucket"])
def skipping(request):
    """That model, and an exchange of buckets of a layer each, or of one."""
    model = Skipping()
    weights = flatten_weights(model)
    lanes = [
        HeldLane(number, piece, weights, None)
        for number, piece in enumerate(cut([4, 2, 4, 2], 1, request.param))
    ]
    made = Exchange(lanes, [4, 2, 4, 2], weights, None, room=1000, patience=0.2)
    made.attach(model, by_layer=False)
    return model, made


def test_a_step_without_a_layer_is_refused_where_backward_ends_and_named(skipping):
    model, made = skipping
    model(torch.ones(1, 2)).sum().backward()
    made.end_backward()
    model(torch.ones(1, 2), without=["second"]).sum().backward()
    with pytest.raises(
        Failure, match=r"^backward gave no gradient of second.weight, second.bias: .*requires_grad_"
    ):
        made.end_backward()


def test_the_last_pass_of_a_step_needs_every_layer_and_the_others_none(skipping):
    model, made = skipping
    for accumulating in (True, False):
        made.bucketer.accumulating = accumulating
        model(torch.ones(1, 2), without=["first"] if accumulating else []).sum().backward()
    made.end_backward()
    for accumulating in (True, False):
        made.bucketer.accumulating = accumulating
        model(torch.ones(1, 2), without=[] if accumulating else ["first"]).sum().backward()
    with pytest.raises(
        Failure, match=r"no gradient of first.weight, first.bias: .* in the last pass"
    ):
        made.end_backward()


def test_a_gradient_that_comes_in_two_parts_is_refused(skipping):
    """As where torch's checkpoint of two layers that share a weight goes back through each alone."""
    model, _ = skipping
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        x = checkpoint(model.first, x, use_reentrant=True)
    with pytest.raises(
        Failure, match="^first.(weight|bias) had two gradients in one backward pass"
    ):
        model.second(x).sum().backward()
