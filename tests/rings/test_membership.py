"""Workers that form a ring anew, each a thread, over the wire that elastic jobs use. Their ring is
one that is told when it cannot start, and when it lacks averages.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import RingBroken
from hvdtrain.job.rings.elastic_group import ElasticGroup
from hvdtrain.job.rings.membership import TRIES, Membership
from hvdtrain.job.rings.restartable import RestartableRing, StateLost
from hvdtrain.job.wire.rendezvous import serve_store

pytestmark = pytest.mark.timeout(60)
WORKERS = 3


class Ring(RestartableRing):
    """Starts, unless it is told not to.

    Attributes:
        failures: what each start raises, in order; None where it starts.
        started: the workers of each ring that has started everywhere.
        abandoned: set when the ring is abandoned while it runs.
    """

    def __init__(self, worker, failures=()):
        self.worker, self.failures = worker, [*failures]
        self.started, self.abandoned = [], threading.Event()

    def prepare(self, model):
        return model

    def offer(self):
        return f"of {self.worker}"

    def start(self, workers, place, offers):
        assert workers[place] == self.worker
        assert offers == {worker: f"of {worker}" for worker in workers}
        self.abandoned.clear()
        self.workers = workers
        failure = self.failures.pop(0) if self.failures else None
        if failure:
            raise failure

    def settle(self):
        self.started.append(self.workers)

    def abandon(self):
        self.abandoned.set()

    def wait(self):
        return ""

    def take_payload(self):
        return 0


@pytest.fixture
def groups(tmp_path):
    """The groups of the workers of one job. Those that are left leave together at the end."""
    store = serve_store("127.0.0.1", 0, 30)

    def group(rank):
        world = World("alone", rank, WORKERS, rank, WORKERS, elastic=True)
        config = RunConfig(mode="ddp", timeout=30)
        job = Job(config, world, tmp_path, torch.device("cpu"), 1, store.clone())
        return ElasticGroup(job)

    with ThreadPoolExecutor(WORKERS) as pool:
        found = list(pool.map(group, range(WORKERS)))
    yield found
    on_each(found, ElasticGroup.close)


def on_each(workers, work):
    """What `work` comes to on each worker, as a result or an exception."""
    with ThreadPoolExecutor(len(workers)) as pool:
        futures = [pool.submit(work, worker) for worker in workers]
        return [future.exception(30) or future.result() for future in futures]


def test_a_ring_that_does_not_start_on_one_worker_starts_again_on_all(groups):
    failures = {1: [RuntimeError("no"), None, RuntimeError("no")]}
    rings = [Ring(worker, failures.get(worker, ())) for worker in range(WORKERS)]
    memberships = [Membership(*pair) for pair in zip(groups, rings, strict=True)]
    on_each(memberships, Membership.form)
    assert [ring.started for ring in rings] == [[[0, 1, 2]]] * WORKERS
    assert [membership.place for membership in memberships] == [(0, 3), (1, 3), (2, 3)]


def test_a_ring_that_never_starts_though_nobody_is_lost_ends_all_workers(groups):
    rings = [Ring(worker, [RuntimeError(f"not on {worker}")] * 9) for worker in range(WORKERS)]
    memberships = [Membership(*pair) for pair in zip(groups, rings, strict=True)]
    ends = on_each(memberships, Membership.form)
    assert [str(end) for end in ends] == [
        f"the ring broke {TRIES} times in a step, although no worker was lost: not on {worker}"
        for worker in range(WORKERS)
    ]
    assert all(isinstance(end, Failure) for end in ends)


def test_what_no_ring_can_go_on_without_is_not_tried_again(groups):
    rings = [Ring(worker, [StateLost("gone")]) for worker in range(WORKERS)]
    memberships = [Membership(*pair) for pair in zip(groups, rings, strict=True)]
    assert [str(end) for end in on_each(memberships, Membership.form)] == ["gone"] * WORKERS


def test_all_take_a_step_or_none_and_who_is_lost_is_in_no_ring(groups):
    rings = [Ring(worker) for worker in range(WORKERS)]
    memberships = [Membership(*pair) for pair in zip(groups, rings, strict=True)]
    on_each(memberships, Membership.form)
    digests = on_each(memberships, lambda one: one.agree("", 10 + one.group.worker))
    assert digests == [33, 0, 0]
    lacks = on_each(memberships, lambda one: one.agree("no" if one is memberships[2] else "", 1))
    assert [type(end) for end in lacks] == [RingBroken] * WORKERS

    *survivors, lost = memberships
    groups.remove(lost.group)
    lost.group.wire.close()
    assert all(ring.abandoned.wait(10) for ring in rings[:2])
    calls = []
    on_each(survivors, lambda one: one.together(lambda: calls.append(one.group.worker)))
    assert sorted(calls) == [0, 0, 1, 1]  # once before they know who is there, and once after
    assert [ring.started[-1] for ring in rings[:2]] == [[0, 1]] * 2
    assert [one.take_change() for one in survivors] == [(0, 2), (1, 2)]
    assert [one.take_change() for one in survivors] == [None, None]
