"""A server's desk: who is owed an answer, and who is not, and what it counts."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.buckets import make_desk, push, stale, sync
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.wire.messages import Answer
from hvdtrain.wire.requests import Requests


def desk_with(policy, workers=2):
    desk = make_desk(policy, workers)
    for bucket in (0, 1):
        desk.install(bucket, torch.zeros(2))
    return desk


def sent(worker, step, version=0):
    return push(worker, step, [1.0, 1.0], version)._replace(gradient=[torch.ones(2)])


def test_a_push_that_is_refused_leaves_nothing_behind_and_a_lost_workers_wait_is_over():
    desk = desk_with(lambda: stale(2, 0))
    assert isinstance(desk.push(0, sent(0, 1)), Future)
    held = desk.owed[desk.buckets[0], 0]
    desk.lose(0)
    with pytest.raises(Failure, match="silent for so long"):
        held.wait()
    with pytest.raises(Failure, match="silent for so long"):
        desk.push(0, sent(0, 2))
    assert desk.owed == {} and desk.load.row()["queue"] == 0


def test_a_push_that_comes_again_while_it_is_held_is_answered_with_the_first():
    desk = desk_with(lambda: sync(2))
    first, again = desk.push(0, sent(0, 1)), desk.push(0, sent(0, 1))
    assert isinstance(desk.push(0, sent(1, 1)), Answer)
    assert first.value().version == again.value().version == 1 and desk.owed == {}


def test_peers_can_call_what_is_listed_and_nothing_else():
    calls = Requests(make_desk()).calls
    assert calls["noted"](0) == {}
    for method in ("reassign_leases", "end", "load", "_act", "__init__", "buckets"):
        with pytest.raises(Failure, match=f"{method} is not for peers"):
            calls[method](0)


def test_who_joins_is_in_all_buckets_when_it_is_answered():
    desk = desk_with(lambda: stale(2, 1))
    with pytest.raises(Failure, match="nobody can join this job now"):
        desk.join("there", 70)
    desk.arrived = lambda member, endpoint, pid: {"rank": 10 * member, "pid": pid}
    joining = desk.join("there", 70)
    for worker in (0, 1):
        desk.push(0, sent(worker, 1))
    desk.open_for_joining(3, {"step": 7, "samples": 9, "batch_size": 3})
    place = joining.value()
    assert (place["member"], place["rank"], place["pid"], place["step"], place["sums"]) == (2, 20, 70, 1, 3)
    assert desk.buckets[0].policy.clocks == {0: 1, 1: 1, 2: 1} and 2 in desk.roster.present
    desk.lose(3)
    with pytest.raises(Failure, match="silent for so long"):  # another server has lost it before it came here
        desk.admit(3, "there", 1, 71)


def test_who_has_joined_by_way_of_another_server_is_told_of_the_end_too():
    desk = make_desk()
    desk.arrived = lambda member, endpoint, pid: {}
    desk.admit(2, "there", 0, 70)
    leaving = [desk.calls["leave"](worker) for worker in (0, 2)]
    desk.act(desk.roster, "end")
    assert [done.done() for done in leaving] == [True, True]
    assert desk.calls["leave"](1) is None and desk.roster.have_left == {0, 1, 2}


def counted(desk):
    row = desk.load.row()
    return {name: row[name] for name in ("pushes", "queue", "waiting", "bytes_received", "bytes_sent")}


def test_a_held_push_is_in_the_queue_and_its_worker_waits_until_all_have_pushed():
    desk = desk_with(lambda: sync(2))
    for bucket in (0, 1):
        assert isinstance(desk.push(bucket, sent(0, 1)), Future)
    assert counted(desk) == {"pushes": 2, "queue": 2, "waiting": 1, "bytes_received": 16, "bytes_sent": 0}
    assert desk.load.row()["applying_s"] == 0
    for bucket in (0, 1):
        assert isinstance(desk.push(bucket, sent(1, 1)), Answer)
    assert counted(desk) == {"pushes": 4, "queue": 0, "waiting": 0, "bytes_received": 32, "bytes_sent": 32}
    assert desk.load.row()["applying_s"] > 0
    desk.calls["pull"](0, 0)
    assert counted(desk)["bytes_sent"] == 40


def test_a_push_waits_in_a_queue_while_another_is_at_the_bucket_and_not_while_it_is_held():
    desk = desk_with(lambda: sync(2))
    held = desk.push(0, sent(0, 1))
    with ThreadPoolExecutor() as pool:
        with desk._locks[desk.buckets[0]]:
            answered = pool.submit(desk.push, 0, sent(1, 1))
            time.sleep(0.05)
            assert not held.done() and desk.load.row()["queued_s"] == 0
        answered.result()
    assert held.done() and 0.04 < desk.load.row()["queued_s"] < 10
