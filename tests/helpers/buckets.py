"""Buckets of a parameter server, their policies and pushes, for tests that drive them with plain
calls; and servers.
"""

import torch

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.numerics.optimizers import make_optimizer
from hvdtrain.job.modes.ps_ssp import StaleSynchronous
from hvdtrain.job.modes.ps_sync import Synchronous
from hvdtrain.job.ps.bucket import Bucket
from hvdtrain.job.ps.server import Server
from hvdtrain.job.wire.messages import Push

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
    return StaleSynchronous(
        workers, RunConfig(push_scale="softsync", look_ahead=look_ahead, **options), staleness
    )


def stale(workers, staleness, push_scale="mean"):
    return StaleSynchronous(workers, RunConfig(push_scale=push_scale), staleness)


class Driven:
    """A bucket with what a server does around it, without locks and futures: answers are lists of
    worker and answer.

    Args:
        ledger: called with each line.
        journal: keeps it, as "bucket 0".
    """

    def __init__(self, bucket, ledger=lambda line: None, journal=None):
        self.bucket, self.ledger, self.journal = bucket, ledger, journal
        self.policy = bucket.policy
        if journal:
            journal.keep(bucket, 0)

    @property
    def version(self):
        return self.bucket.weights.version

    @property
    def weights(self):
        return self.bucket.weights.tensor

    def push(self, message):
        gradient = message.gradient
        return self._answers(self.bucket.push(message._replace(gradient=None), gradient))

    def idle(self, *message, **named):
        return self._answers(self.bucket.idle(*message, **named))

    def lose(self, worker):
        return self._answers(self.bucket.lose(worker))

    def flush(self):
        return self._answers(self.bucket.flush())

    def join(self, worker, step):
        self.bucket.join(worker, step)
        self._write_down()

    def resume(self, step, state):
        self.bucket.resume(step, state)
        self._write_down()

    def pull(self, worker):
        answer = self.bucket.pull(worker)
        self._write_down()
        return answer

    def slowest(self, default):
        return self.bucket.slowest(default)

    def optimizer_state(self):
        return self.bucket.optimizer_state()

    def _answers(self, answers):
        self._write_down()
        return list(answers.items())

    def _write_down(self):
        lines = self.bucket.take_lines()
        if self.journal:
            self.journal.commit(self.bucket, lines)
        for line in lines:
            self.ledger(line)


def make(policy, weights=(1.0, 2.0), config=PLAIN, journal=None, ledger=lambda line: None):
    bucket = Bucket(
        torch.tensor(weights), lambda p: make_optimizer(config, p), policy, journal is not None
    )
    return Driven(bucket, ledger, journal)


def make_server(policy=None, workers=2, **more):
    """A server whose buckets have this policy each."""

    def make_bucket(number, weights, optimizer):
        def timed(parameters):
            return server.load.time_steps_of(make_optimizer(PLAIN, parameters))

        kept = server.shared.keep(weights)
        return Bucket(kept, timed, policy(), memory=server.shared)

    server = Server(workers, make_bucket, **more)
    return server


def push(worker, step, gradient, version=0, lr=LR):
    return Push(worker, step, version, lr, torch.tensor(gradient, dtype=torch.float32))


def answered(bucket, message):
    """The answer to this push, which comes at once and alone."""
    [(worker, answer)] = bucket.push(message)
    assert worker == message.worker
    return answer


def holds(answer, version, staleness, weights):
    assert (answer.version, answer.staleness, answer.weights.tolist()) == (
        version,
        staleness,
        list(weights),
    )
