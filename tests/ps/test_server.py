"""A server: who is owed an answer, and who is not, and what it counts."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.buckets import asynchronous, make_server, push, stale, sync
from helpers.shared_memory import met
from torch.futures import Future

from hvdtrain.base.errors import Failure
from hvdtrain.job.wire.messages import FreshWeights
from hvdtrain.job.wire.requests import Requests


def server_with(policy, workers=2):
    server = make_server(policy, workers)
    for bucket in (0, 1):
        server.install(bucket, torch.zeros(2))
    return server


def sent(worker, step, version=0):
    return push(worker, step, [1.0, 1.0], version)._replace(gradient=[torch.ones(2)])


def test_a_push_that_is_refused_leaves_nothing_behind_and_a_lost_workers_wait_is_over():
    server = server_with(lambda: stale(2, 0))
    assert isinstance(server.push(0, sent(0, 1)), Future)
    held = server.pending[server.buckets[0], 0]
    server.lose(0)
    with pytest.raises(Failure, match="silent for so long"):
        held.wait()
    with pytest.raises(Failure, match="silent for so long"):
        server.push(0, sent(0, 2))
    assert server.pending == {} and server.load.row()["queue"] == 0


def test_a_push_that_comes_again_while_it_is_held_is_answered_with_the_first():
    server = server_with(lambda: sync(2))
    first, again = server.push(0, sent(0, 1)), server.push(0, sent(0, 1))
    assert isinstance(server.push(0, sent(1, 1)), FreshWeights)
    assert first.value().version == again.value().version == 1 and server.pending == {}


@pytest.mark.parametrize("compensation", [0.0, 0.5])
def test_weights_are_updated_where_they_lie_unless_a_worker_may_still_read_them(compensation):
    memory, *workers = met(0, 1, 2, size=3)
    server = make_server(lambda: asynchronous(2, delay_compensation=compensation), shared=memory)
    server.install(0, torch.ones(5000))
    gradient = torch.ones(5000)

    def pushed(worker, step):
        push_of_step = push(worker, step, 0.0)._replace(gradient=[gradient.clone()])
        return server.push(0, push_of_step)

    def updated_in_place(worker, step):
        before = server.buckets[0].weights.tensor.data_ptr()
        workers[worker].get(pushed(worker, step).weights)
        return server.buckets[0].weights.tensor.data_ptr() == before

    for worker in (0, 1):
        workers[worker].get(server.pull(0, worker).weights)
    assert updated_in_place(0, 1) == (not compensation)
    read = workers[1].get(server.pull(0, 1).weights)
    as_read = read.clone()
    assert not updated_in_place(0, 2)
    assert read.equal(as_read)
    del read
    assert updated_in_place(0, 3)


def test_peers_can_call_what_is_listed_and_nothing_else():
    calls = Requests(make_server()).calls
    assert calls["noted"](0) == {}
    for method in ("handle", "know", "end", "load", "_locks", "__init__", "buckets"):
        with pytest.raises(Failure, match=f"{method} is not for peers"):
            calls[method](0)


def test_who_joins_is_in_all_buckets_when_it_is_answered():
    server = server_with(lambda: stale(2, 1))
    with pytest.raises(Failure, match="nobody can join this job now"):
        server.join("there", 70)
    server.arrived = lambda member, endpoint, pid: {"rank": 10 * member, "pid": pid}
    joining = server.join("there", 70)
    for worker in (0, 1):
        server.push(0, sent(worker, 1))
    server.open_for_joining(3, {"step": 7, "sizes": {"samples": 9, "batch_size": 3}})
    place = joining.value()
    assert (place["member"], place["rank"], place["pid"], place["step"], place["sums"]) == (
        2,
        20,
        70,
        1,
        3,
    )
    assert server.buckets[0].policy.clocks == {0: 1, 1: 1, 2: 1} and 2 in server.roster.present
    server.lose(3)
    # another server has lost it before it came here
    with pytest.raises(Failure, match="silent for so long"):
        server.admit(3, "there", 1, 71)


def test_who_has_joined_by_way_of_another_server_is_told_of_the_end_too():
    server = make_server()
    server.arrived = lambda member, endpoint, pid: {}
    server.admit(2, "there", 0, 70)
    leaving = [server.calls["leave"](worker) for worker in (0, 2)]
    server.handle(server.roster, server.roster.end)
    assert [done.done() for done in leaving] == [True, True]
    assert server.calls["leave"](1) is None and server.roster.have_left == {0, 1, 2}


def counted(server):
    row = server.load.row()
    return {
        name: row[name] for name in ("pushes", "queue", "waiting", "bytes_received", "bytes_sent")
    }


def test_a_held_push_is_in_the_queue_and_its_worker_waits_until_all_have_pushed():
    server = server_with(lambda: sync(2))
    for bucket in (0, 1):
        assert isinstance(server.push(bucket, sent(0, 1)), Future)
    assert counted(server) == {
        "pushes": 2,
        "queue": 2,
        "waiting": 1,
        "bytes_received": 16,
        "bytes_sent": 0,
    }
    assert server.load.row()["applying_s"] == 0
    for bucket in (0, 1):
        assert isinstance(server.push(bucket, sent(1, 1)), FreshWeights)
    assert counted(server) == {
        "pushes": 4,
        "queue": 0,
        "waiting": 0,
        "bytes_received": 32,
        "bytes_sent": 32,
    }
    assert server.load.row()["applying_s"] > 0
    server.calls["pull"](0, 0)
    assert counted(server)["bytes_sent"] == 40


def test_a_push_waits_in_a_queue_while_another_is_at_the_bucket_and_not_while_it_is_held():
    server = server_with(lambda: sync(2))
    held = server.push(0, sent(0, 1))
    with ThreadPoolExecutor() as pool:
        with server._locks[server.buckets[0]]:
            answered = pool.submit(server.push, 0, sent(1, 1))
            time.sleep(0.3)
            assert not held.done() and server.load.row()["queued_s"] == 0
        answered.result()
    assert held.done() and 0.04 < server.load.row()["queued_s"] < 10
