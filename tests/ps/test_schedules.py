"""Jobs under drawn schedules: whatever comes first, and whoever is lost, these things hold.

A schedule that fails is repeated by its number: `-k 'schedule[17]'`. HVDTRAIN_SCHEDULES=2000 draws
so many.
"""

import os
from collections import defaultdict

import pytest
import torch
from helpers.schedules import EPOCHS, SAMPLES, Schedule, TinyModel

from hvdtrain.base import modes
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.job.coordination.leases import Leases
from hvdtrain.job.modes.ps_ssp import StaleSynchronous
from hvdtrain.job.modes.ps_sync import Synchronous
from hvdtrain.job.ps.bucket import Bucket
from hvdtrain.job.ps.policy import PolicyDecision
from hvdtrain.tools.checks.agreement import TOLERANCE, distance

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = int(os.environ.get("HVDTRAIN_SCHEDULES", "100"))


def check(schedule):
    """Runs a job, and checks what holds in every schedule.

    That nobody waits for ever, LocalNetwork.run sees; that each share counts once in each bucket,
    Playback.
    """
    schedule.run()
    by_epoch = defaultdict(list)
    for (step, _), weights in schedule.weights.items():
        by_epoch[step].append(weights)
    for weights in by_epoch.values():
        assert all(torch.equal(weights[0], other) for other in weights), "workers differ"
    assert torch.equal(schedule.replayed(), schedule.last_weights), "a replay differs"
    config = schedule.config
    if modes.declared(config.mode).lockstep:
        if not config.backup and not config.local_steps and config.compression == "none":
            assert apart(schedule) <= TOLERANCE
        return
    counted = schedule.servers[0].leases.samples
    assert sum(counted.values()) == EPOCHS * SAMPLES
    if config.mode == "ps-ssp" and schedule.lost is None:
        assert schedule.staleness() <= (schedule.workers - 1) * (2 * config.staleness + 1)


def apart(schedule):
    """How far the weights are from those of one process, in shares of the way trained."""
    began = torch.cat([p.detach().flatten() for p in TinyModel().parameters()])
    vectors = (schedule.last_weights, schedule.in_one_process(), began)
    arrays = [vector.double().numpy() for vector in vectors]
    return distance(*arrays, schedule.config.optimizer)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_what_holds_in_every_schedule(seed, tmp_path):
    check(Schedule(seed, tmp_path))


def without_staleness_bound(monkeypatch):
    make = StaleSynchronous.__init__

    def looser(self, workers, config, staleness):
        make(self, workers, config, None if staleness is None else staleness + 4)

    monkeypatch.setattr(StaleSynchronous, "__init__", looser)


def without_waiting_for_the_last_worker(monkeypatch):
    make = Synchronous.__init__

    def early(self, workers, config):
        make(self, workers, config)
        self.needed = max(1, self.needed - 1)

    monkeypatch.setattr(Synchronous, "__init__", early)


def with_a_wrong_ledger(monkeypatch):
    record = Bucket._record

    def wrong(self, push, version):
        record(self, push._replace(worker=0), version)

    monkeypatch.setattr(Bucket, "_record", wrong)


def without_leasing_lost_shares_again(monkeypatch):
    monkeypatch.setattr(Leases, "lose", lambda self, worker: {})


def with_a_lost_workers_shares_counted_twice(monkeypatch):
    lose = Bucket.lose

    def forgetful(self, worker):
        self.gate.shares.pop(worker, None)
        return lose(self, worker)

    monkeypatch.setattr(Bucket, "lose", forgetful)


def with_somebody_waiting_for_a_lost_worker(monkeypatch):
    monkeypatch.setattr(StaleSynchronous, "lose", lambda self, worker: PolicyDecision())


@pytest.mark.parametrize(
    "mutate",
    [
        without_staleness_bound,
        without_waiting_for_the_last_worker,
        with_a_wrong_ledger,
        without_leasing_lost_shares_again,
        with_a_lost_workers_shares_counted_twice,
        with_somebody_waiting_for_a_lost_worker,
    ],
)
def test_schedules_find_what_is_broken_on_purpose(mutate, monkeypatch, tmp_path):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, Failure, UsageError)):
        for seed in range(SCHEDULES):
            folder = tmp_path / str(seed)
            folder.mkdir()
            check(Schedule(seed, folder))
