"""Sums over the workers that are still there, with plain calls."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import Failure
from hvdtrain.ps.group import ServerGroup
from hvdtrain.ps.leases import Leases
from hvdtrain.ps.membership import Membership
from hvdtrain.ps.requests import Requests
from hvdtrain.ps.server import Server
from hvdtrain.ps.server_metrics import Load
from hvdtrain.ps.zeromq import ZeroMQ
from hvdtrain.world.place import World


def one_hot(worker, workers):
    return torch.eye(workers)[worker]


def test_a_sum_is_done_when_every_worker_has_given_its_part():
    membership = Membership(2)
    total = membership.add(1, 1, torch.tensor([1.0, 2.0]))
    assert not total.done()
    assert membership.missing(1, 1) == [0]
    assert membership.add(0, 1, torch.tensor([3.0, 4.0])).wait().tolist() == total.wait().tolist() == [4.0, 6.0]
    assert membership.missing(1, 1) == []


def test_a_sum_does_not_wait_for_who_is_lost_and_keeps_what_it_gave():
    membership = Membership(3)
    first = membership.add(2, 1, one_hot(2, 3))
    membership.lose(2)
    membership.add(0, 1, one_hot(0, 3))
    assert membership.add(1, 1, one_hot(1, 3)).wait().tolist() == first.wait().tolist() == [1, 1, 1]
    second = membership.add(0, 2, one_hot(0, 3))
    membership.lose(1)
    assert second.wait().tolist() == [1, 0, 0]


def test_a_summand_that_comes_again_counts_once():
    membership = Membership(2)
    membership.add(0, 1, torch.ones(1))
    again = membership.add(0, 1, torch.ones(1))
    assert membership.add(1, 1, torch.ones(1)).wait().tolist() == again.wait().tolist() == [2]
    assert membership.add(0, 1, torch.ones(1)).wait().tolist() == [2]  # its answer was lost on the way


class LastIsLate(Server):
    """The last summand comes when the call for the sum has expired, and before its worker asks why."""

    def missing(self, worker, number, seconds):
        self.membership.add(1, number, torch.ones(1))
        return super().missing(worker, number, seconds)


def test_a_sum_that_was_done_just_after_the_call_for_it_had_expired_is_asked_for_again():
    server = ZeroMQ("tcp://127.0.0.1", Requests(LastIsLate(None, None, Membership(2), Leases(), Load())))
    worker = ZeroMQ("tcp://127.0.0.1", Requests(), patience=0.2)
    worker.endpoints[0] = server.endpoint
    try:
        group = ServerGroup(worker, World("mpirun", 1, 3, 1, 3, servers=1), torch.distributed.HashStore(), timeout=60)
        assert group.sum(torch.ones(1)).tolist() == [2]
    finally:
        worker.close()
        server.close()


def test_who_pushes_or_comes_is_not_silent():
    membership = Membership(3)
    time.sleep(0.05)
    membership.heard(0)
    membership.add(1, 1, torch.ones(1))
    assert membership.silent([0, 1, 2], 0.04) == [2]


def test_who_was_given_up_is_told_so():
    membership = Membership(2)
    membership.lose(1)
    with pytest.raises(Failure, match="silent for so long that the others went on without it"):
        membership.add(1, 1, torch.ones(1))
    with pytest.raises(Failure, match="silent for so long"):  # and does not ask for whom it waits again and again
        membership.missing(1, 1)


def test_who_joins_is_waited_for_from_the_round_that_is_open_on():
    membership = Membership(2)
    joining = membership.join()
    assert not joining.done()  # the others are together, and nobody knows for how long
    membership.open_for_joining(3, {"step": 7})
    worker, now = joining.wait()
    assert (worker, now.sums, now.state) == (2, 3, {"step": 7})
    total = membership.add(0, 4, one_hot(0, 3))
    membership.add(1, 4, one_hot(1, 3))
    assert not total.done() and membership.missing(0, 4) == [2]
    membership.add(2, 4, one_hot(2, 3))
    assert total.wait().tolist() == [1, 1, 1]
    assert not membership.join().done()  # they are together again: this round is over


def test_a_round_that_is_over_when_it_is_opened_lets_nobody_in():
    membership = Membership(1)
    membership.add(0, 1, torch.ones(1))
    membership.open_for_joining(0, None)
    assert not membership.join().done()


def test_nobody_gets_the_number_of_one_that_is_lost():
    membership = Membership(2)
    membership.open_for_joining(0, None)
    membership.lose(1)
    assert membership.join().wait()[0] == 2
    membership.lose(2)
    assert membership.join().wait()[0] == 3
    with pytest.raises(Failure, match="silent for so long"):
        membership.add(2, 1, torch.ones(1))


def test_when_all_are_lost_who_joins_begins_the_last_round_again():
    membership = Membership(2)
    membership.open_for_joining(0, "first")
    for worker in (0, 1):
        membership.add(worker, 1, torch.ones(1))
    membership.lose(0)
    joining = membership.join()
    assert not joining.done()  # worker 1 is beyond that round
    membership.lose(1)
    worker, now = joining.wait()
    assert (worker, now.sums, now.state) == (2, 0, "first")
    assert membership.add(2, 1, torch.ones(1)).wait().tolist() == [1]  # and not the sum of those before


def test_who_comes_too_late_is_told_so():
    membership = Membership(1)
    joining = membership.join()
    membership.close("the job is over")
    with pytest.raises(Failure, match="the job is over"):
        joining.wait()


def test_summands_that_are_kept_apart_are_rows_in_the_order_of_the_workers():
    membership = Membership(2)
    membership.add(1, 1, torch.tensor([1.0, 5.0]), as_rows=True)
    assert membership.add(0, 1, torch.tensor([0.0, 6.0]), as_rows=True).wait().tolist() == [[0, 6], [1, 5]]


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 3), max_size=2), st.randoms(use_true_random=False))
def test_all_get_the_same_sums_in_whatever_order_they_come_or_go(workers, sums, leavers, rng):
    """Who is counted in a sum gave its summand; who is not counted was lost; nobody waits for ever."""
    membership = Membership(workers)
    at = dict.fromkeys(range(workers), 0)  # worker -> its last sum
    totals = {}
    leavers = {worker for worker in leavers if worker < workers}
    while any(number < sums or not totals[worker].done() for worker, number in at.items()):
        if leavers and rng.random() < 0.3:
            worker = leavers.pop()
            membership.lose(worker)
            del at[worker]
            continue
        ready = [w for w, n in at.items() if n < sums and (w not in totals or totals[w].done())]
        assert ready, "all wait for each other"
        worker = rng.choice(ready)
        at[worker] += 1
        totals[worker] = membership.add(worker, at[worker], one_hot(worker, workers))
        seen = {tuple(totals[w].wait().tolist()) for w, n in at.items() if n == at[worker] and totals[w].done()}
        assert len(seen) <= 1
    for worker in at:
        counted = totals[worker].wait().tolist()
        assert all(counted[other] for other in at)
