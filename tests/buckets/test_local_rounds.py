"""Local steps around a synchroniser that carries buckets, on one worker."""

import pytest
import torch
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.world.place import World
from hvdtrain.job.buckets.local_rounds import LeasedRounds, LeasingCarrier, LocalRounds
from hvdtrain.job.buckets.partition import cut
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.store_group import StoreGroup
from hvdtrain.job.coordination.synchroniser import LeasesShares

LR = 0.25  # of the inner optimizer: numbers are exact in float32


class Carrier(LeasingCarrier):
    """Takes Δ of this worker as the outer step, and counts steps as a server does."""

    def __init__(self, job):
        self.job, self.group = job, StoreGroup(job.world)
        self.step, self.sent_at, self.waited, self.shares, self.requests = 0, [], [], [], 0

    def carry(self, sizes, weights):
        self.weights, self.buckets = weights, cut(sizes, 1, 2)
        return self.buckets

    def prepare(self, model):
        raise AssertionError("carry takes its place")

    def begin(self, step, lr):
        raise AssertionError("begin_carrying takes its place")

    def begin_carrying(self, lr, buckets, is_new_step):
        self.lr, self.pushes = lr, buckets
        self.step += is_new_step

    def send(self, values):
        self.sent_at.append((self.step, sorted(values)))
        assert len(values) == self.pushes
        for number, delta in values.items():
            bucket = self.buckets[number]
            self.weights[bucket.start : bucket.stop] -= self.lr * delta

    def wait_for(self, numbers):
        self.waited.append([*numbers])

    def restore(self, step, state, own=()):
        pass

    def optimizer_parts(self):
        return iter(())

    def traffic(self, steps):
        return 0, 0

    def request_share(self):
        self.requests += 1

    def take_share(self, number, steps):
        self.shares.append(number)


@pytest.fixture
def job(tmp_path):
    config = RunConfig(
        mode="ps-async",
        optimizer="sgd",
        momentum=0.0,
        local_steps=3,
        outer_lr=0.5,
        outer_momentum=0.0,
    )
    return Job(config, World("mpirun", 0, 1, 0, 1), tmp_path, torch.device("cpu"), 1)


def take_step(sync, model):
    """One step whose gradient is 1 everywhere; what the weights were in forward."""
    sync.begin(1, LR)
    seen = torch.cat([p.detach().clone() for p in model.parameters()])
    sum(p.sum() for p in model.parameters()).backward()
    sync.wait()
    sync.update()
    model.zero_grad()
    return seen


def test_a_round_ends_with_one_send_and_the_next_begins_with_what_it_came_to(job):
    model, carrier = nn.ParameterList([torch.zeros(2), torch.zeros(2)]), Carrier(job)
    sync = LocalRounds(carrier, job)
    sync.prepare(model)
    seen = [take_step(sync, model)[0].item() for _ in range(7)]
    # Δ of a round is 0.75, of which the outer step takes a half.
    assert seen == [0, -0.25, -0.5, -0.375, -0.625, -0.875, -0.75]
    assert carrier.sent_at == [(3, [0, 1]), (6, [0, 1])] and carrier.waited == [[0, 1]] * 2
    assert sync.rounds.number == 2 and carrier.requests == 0
    sync.refresh()
    assert all(torch.equal(p, torch.full((2,), -0.75)) for p in model)


def test_a_round_of_leased_shares_is_one_step_of_the_servers_and_a_short_one_counts_less(job):
    model, carrier = nn.ParameterList([torch.zeros(2), torch.zeros(2)]), Carrier(job)
    sync = LeasedRounds(carrier, job)
    assert isinstance(sync, LeasesShares)
    sync.prepare(model)
    sync.take_share(7, 3)
    sync.take_share(9, 1)
    seen = [take_step(sync, model)[0].item() for _ in range(4)]
    assert seen == [0, -0.25, -0.5, -0.375]
    assert carrier.sent_at == [(1, [0, 1]), (2, [0, 1])] and carrier.shares == [7, 9]
    # The last round's Δ is 0.25, and has a third of a round's samples.
    torch.testing.assert_close(carrier.weights, torch.full((4,), -0.375 - 0.5 * 0.25 / 3))
    assert carrier.requests == 8  # in backward and after it: the carrier asks once a push
    assert not sync.ended_round and sync.local.is_over
