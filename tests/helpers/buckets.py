"""Buckets of a parameter server, their policies and pushes, for tests that drive them with plain calls."""

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.modes.ps_ssp import StaleSynchronous
from hvdtrain.modes.ps_sync import Synchronous
from hvdtrain.numerics.optimizers import make_optimizer
from hvdtrain.ps.bucket import Bucket
from hvdtrain.ps.messages import Push

PLAIN = RunConfig(optimizer="sgd", momentum=0.0)
READER = 9  # a worker that pushes nothing
LR = 0.125  # a power of two: with whole gradients, and 1, 2 or 4 workers, every sum below is exact in float32


def sync(workers, scale=1.0, backup=0):
    return Synchronous(workers, RunConfig(backup=backup))


def asynchronous(workers, scale=1.0, **options):
    """`scale` of the learning rate: 1/workers or 1."""
    assert scale in (1.0, 1 / workers)
    config = RunConfig(push_scale="none" if scale == 1.0 else "mean", **options)
    return StaleSynchronous(workers, config, staleness=None)


def softsync(workers, staleness=None, look_ahead=0.0, **options):
    """As many pushes as there are workers make a step."""
    return StaleSynchronous(workers, RunConfig(push_scale="softsync", look_ahead=look_ahead, **options), staleness)


def stale(workers, staleness, push_scale="mean"):
    return StaleSynchronous(workers, RunConfig(push_scale=push_scale), staleness)


def make(policy, weights=(1.0, 2.0), config=PLAIN, **more):
    return Bucket(torch.tensor(weights), lambda p: make_optimizer(config, p), policy, **more)


def push(worker, step, gradient, version=0, lr=LR):
    return Push(worker, step, version, lr, torch.tensor(gradient, dtype=torch.float32))


def answered(bucket, message):
    """The answer to this push, which comes at once and alone."""
    [(worker, answer)] = bucket.push(message)
    assert worker == message.worker
    return answer


def holds(answer, version, staleness, weights):
    assert (answer.version, answer.staleness, answer.weights.tolist()) == (version, staleness, list(weights))
