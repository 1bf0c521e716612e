"""Local steps against plain arithmetic, on a ring's end and on a server's."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.flat import flatten_weights
from hvdtrain.base.numerics.optimizers import make_outer_optimizer
from hvdtrain.job.buckets.local_steps import LocalSteps
from hvdtrain.job.buckets.partition import cut
from hvdtrain.job.modes.ps_sync import make_policy
from hvdtrain.job.ps.bucket import Bucket
from hvdtrain.job.wire.messages import Push

PUBLISHED = json.loads((Path(__file__).parent / "local_steps.json").read_text())


class Quadratic(nn.Module):
    """The loss of one worker in the fixture; its weights lie in two parameters."""

    def __init__(self, curvature, target):
        super().__init__()
        start = torch.tensor(PUBLISHED["start"])
        self.parts = nn.ParameterList([start[:1].clone(), start[1:].clone()])
        self.curvature, self.target = torch.tensor(curvature), torch.tensor(target)

    def forward(self):
        return (self.curvature / 2 * (torch.cat(list(self.parts)) - self.target) ** 2).sum()


class RingOuter:
    """What each rank of a ring does with the mean of Δ."""

    def __init__(self, config, weights):
        self.weights = weights
        self.optimizer = make_outer_optimizer(config, [weights], workers=2)

    def take(self, deltas):
        self.weights.grad = (deltas[0] + deltas[1]) / 2
        self.optimizer.step()


class ServerOuter:
    """A server's bucket, to which each worker pushes its Δ."""

    def __init__(self, config, weights):
        self.lr, self.step = config.outer_lr, 0
        self.bucket = Bucket(
            weights, lambda p: make_outer_optimizer(config, p, workers=2), make_policy(2, config)
        )
        self.optimizer = self.bucket.weights.optimizer

    @property
    def weights(self):
        return self.bucket.weights.tensor

    def take(self, deltas):
        self.step += 1
        for worker, delta in enumerate(deltas):
            self.bucket.push(Push(worker, self.step, self.step - 1, self.lr, None), delta.clone())


def local_steps(config, model, pieces):
    weights = flatten_weights(model)
    return LocalSteps(config, model, weights, weights.clone(), pieces)


def take_step(worker, model):
    """The buckets that leave after it."""
    worker.begin_step()
    worker.begin(PUBLISHED["lr"])
    model().backward()
    leaving = worker.step()
    model.zero_grad()
    return leaving


@pytest.mark.parametrize("make_outer", [RingOuter, ServerOuter])
@pytest.mark.parametrize("case", PUBLISHED["cases"], ids=lambda case: case["outer"])
def test_rounds_come_to_what_the_published_algorithm_does(case, make_outer):
    options = {name: case[name] for name in ("outer", "outer_lr", "outer_momentum")}
    config = RunConfig(
        optimizer="sgd", momentum=0.0, local_steps=PUBLISHED["local_steps"], **options
    )
    models = [
        Quadratic(*both) for both in zip(PUBLISHED["curvature"], PUBLISHED["target"], strict=True)
    ]
    workers = [local_steps(config, model, cut([1, 2], 1, 3)) for model in models]
    outer = make_outer(config, torch.tensor(PUBLISHED["start"]))
    for expected in case["rounds"]:
        for model, worker in zip(models, workers, strict=True):
            while not worker.is_over:
                take_step(worker, model)
        deltas = [worker.difference(0) for worker in workers]
        outer.take(deltas)
        for worker in workers:
            worker.outer.copy_(outer.weights)
            worker.begin_round()
        velocity = outer.optimizer.state[outer.weights]["momentum_buffer"]
        values = (deltas[0] + deltas[1]) / 2, velocity, workers[0].weights
        for name, value in zip(("delta", "v", "theta"), values, strict=True):
            torch.testing.assert_close(value, torch.tensor(expected[name]), atol=1e-6, rtol=0)
        assert torch.equal(workers[0].weights, workers[1].weights)


@pytest.mark.parametrize("make_outer", [RingOuter, ServerOuter])
def test_fragments_come_to_what_streaming_does(make_outer):
    """The outer weights that a step brings are taken when the next begins: the fixture has them
    with that step.
    """
    case = PUBLISHED["fragments"]
    options = {
        name: case[name]
        for name in ("local_steps", "fragments", "outer", "outer_lr", "outer_momentum")
    }
    config = RunConfig(optimizer="sgd", momentum=0.0, **options)
    models = [
        Quadratic(*both) for both in zip(PUBLISHED["curvature"], PUBLISHED["target"], strict=True)
    ]
    pieces = cut([1, 2], 1, 3, case["fragments"])
    workers = [local_steps(config, model, pieces) for model in models]
    places = [workers[0].place(number) for number in range(len(pieces))]
    outers = [make_outer(config, torch.tensor(PUBLISHED["start"])[place]) for place in places]
    for expected in case["steps"]:
        leaving = [take_step(worker, model) for worker, model in zip(workers, models, strict=True)]
        for number in leaving[0]:
            outers[number].take([worker.difference(number) for worker in workers])
        for worker, weights in zip(workers, expected["workers"], strict=True):
            for place, outer in zip(places, outers, strict=True):
                worker.outer[place] = outer.weights
            torch.testing.assert_close(
                worker.outer, torch.tensor(expected["outer"]), atol=1e-6, rtol=0
            )
            worker.show_outer()
            assert torch.equal(worker.weights, worker.outer)
            worker.begin(PUBLISHED["lr"])
            torch.testing.assert_close(worker.weights, torch.tensor(weights), atol=1e-6, rtol=0)
