"""Buckets of a parameter server, their policies and pushes, for tests that drive them with plain calls; and desks."""

from functools import partial

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.modes.ps_ssp import StaleSynchronous
from hvdtrain.modes.ps_sync import Synchronous
from hvdtrain.numerics.optimizers import make_optimizer
from hvdtrain.ps.bucket import Bucket
from hvdtrain.ps.desk import Desk
from hvdtrain.wire.messages import Push

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


class Driven:
    """A bucket with what a desk does around it, without locks and futures: replies are lists, of worker and answer.

    Args:
        ledger: called with each line.
        journal: keeps it, as "bucket 0".
    """

    def __init__(self, bucket, ledger=lambda line: None, journal=None):
        self.bucket, self.ledger, self.journal = bucket, ledger, journal
        self.policy = bucket.policy
        if journal:
            journal.keep(bucket, 0)

    def __getattr__(self, name):
        """What it is asked for, or the weights' shard has."""
        return partial(self._act, getattr(self.bucket, name)) if hasattr(Bucket, name) else getattr(self.shard, name)

    @property
    def shard(self):
        return self.bucket.shard

    def push(self, message):
        return self._act(self.bucket.push, message._replace(gradient=None), message.gradient)

    def pull(self, worker):
        [(_, answer)] = self._act(self.bucket.pull, worker)
        return answer

    def slowest(self, otherwise):
        [(_, slowest)] = self._act(self.bucket.slowest, otherwise)
        return slowest

    def _act(self, act, *message, **named):
        replies, lines, _ = act(*message, **named)
        if self.journal:
            self.journal.commit(self.bucket, lines)
        for line in lines:
            self.ledger(line)
        return list(replies.items())


def make(policy, weights=(1.0, 2.0), config=PLAIN, journal=None, ledger=lambda line: None):
    bucket = Bucket(torch.tensor(weights), lambda p: make_optimizer(config, p), policy, journal is not None)
    return Driven(bucket, ledger, journal)


def make_desk(policy=None, workers=2, **more):
    """A server's, whose buckets have this policy each."""

    def make_bucket(number, weights):
        return Bucket(weights, lambda p: desk.load.time_steps_of(make_optimizer(PLAIN, p)), policy())

    desk = Desk(workers, make_bucket, **more)
    return desk


def push(worker, step, gradient, version=0, lr=LR):
    return Push(worker, step, version, lr, torch.tensor(gradient, dtype=torch.float32))


def answered(bucket, message):
    """The answer to this push, which comes at once and alone."""
    [(worker, answer)] = bucket.push(message)
    assert worker == message.worker
    return answer


def holds(answer, version, staleness, weights):
    assert (answer.version, answer.staleness, answer.weights.tolist()) == (version, staleness, list(weights))
