"""Sums over the workers that are still there, with plain calls."""

import pytest
import torch
from helpers.buckets import make_server
from helpers.parts import DrivenRoster
from hypothesis import given
from hypothesis import strategies as st
from torch.futures import Future

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination import server_group
from hvdtrain.job.coordination.roster import Roster
from hvdtrain.job.coordination.server_group import ServerGroup
from hvdtrain.job.wire.messages import UNLIKE
from hvdtrain.job.wire.requests import WATCH, Requests
from hvdtrain.job.wire.zeromq import ZeroMQ


def one_hot(worker, workers):
    return torch.eye(workers)[worker]


def test_a_sum_does_not_wait_for_who_is_lost_and_keeps_what_it_gave():
    roster = DrivenRoster(3)
    first = roster.add(2, 1, one_hot(2, 3))
    roster.lose(2)
    roster.add(0, 1, one_hot(0, 3))
    assert roster.add(1, 1, one_hot(1, 3)).wait().tolist() == first.wait().tolist() == [1, 1, 1]
    second = roster.add(0, 2, one_hot(0, 3))
    roster.lose(1)
    assert second.wait().tolist() == [1, 0, 0]


def test_a_summand_that_comes_again_counts_once():
    roster = DrivenRoster(2)
    roster.add(0, 1, torch.ones(1))
    again = roster.add(0, 1, torch.ones(1))
    assert roster.add(1, 1, torch.ones(1)).wait().tolist() == again.wait().tolist() == [2]
    assert roster.add(0, 1, torch.ones(1)).wait().tolist() == [2]  # its answer was lost on the way


def test_a_sum_waits_beyond_the_timeout_and_tells_for_whom_until_the_server_is_lost(monkeypatch):
    """The other worker adds its number when it has been told of."""
    first = make_server()
    server, worker = (
        ZeroMQ("tcp://127.0.0.1", Requests(first)),
        ZeroMQ("tcp://127.0.0.1", Requests()),
    )
    worker.endpoints[0] = server.endpoint
    group = ServerGroup(
        worker, World("mpirun", 1, 3, 1, 3, servers=1), torch.distributed.HashStore(), timeout=0.3
    )
    told = []

    def tell(line):
        told.append(line)
        first.sum(1, 1, torch.ones(1))

    monkeypatch.setattr(server_group, "tell", tell)
    try:
        assert group.sum(torch.ones(1)).tolist() == [2]
        assert told == ["waiting for rank 2, alive, for 1 min"]
        waits = group.sum_later(torch.ones(1))
        worker.watch(0, 0.3, lambda why: None)
        first.calls[WATCH] = lambda: Future()
        with pytest.raises(Failure, match="rank 0 failed: no answer within 0.3 s"):
            waits()
    finally:
        worker.close()
        server.close()


def test_the_first_of_those_that_wait_for_a_sum_is_told_for_whom():
    roster = DrivenRoster(4)
    for worker in (3, 1):
        roster.add(worker, 1, torch.ones(1))
    assert roster.missing(1, 1) == [0, 2]
    assert roster.missing(3, 1) == roster.missing(1, 2) == []


def test_who_was_given_up_is_told_so():
    roster = DrivenRoster(2)
    roster.lose(1)
    with pytest.raises(Failure, match="silent for so long that the others went on without it"):
        roster.add(1, 1, torch.ones(1))


def test_who_joins_is_waited_for_from_the_round_that_is_open_on():
    roster = DrivenRoster(2)
    joining = roster.join()
    assert not joining.done()  # the others are together, and nobody knows for how long
    roster.open_for_joining(3, {"step": 7})
    worker, now = joining.wait()
    assert (worker, now.sums, now.state) == (2, 3, {"step": 7})
    total = roster.add(0, 4, one_hot(0, 3))
    roster.add(1, 4, one_hot(1, 3))
    assert not total.done() and roster.missing(0, 4) == [2]
    roster.add(2, 4, one_hot(2, 3))
    assert total.wait().tolist() == [1, 1, 1]
    assert not roster.join().done()  # they are together again: this round is over


def test_a_round_that_is_over_when_it_is_opened_lets_nobody_in():
    roster = DrivenRoster(1)
    roster.add(0, 1, torch.ones(1))
    roster.open_for_joining(0, None)
    assert not roster.join().done()


def test_nobody_gets_the_number_of_one_that_is_lost():
    roster = DrivenRoster(2)
    roster.open_for_joining(0, None)
    roster.lose(1)
    assert roster.join().wait()[0] == 2
    roster.lose(2)
    assert roster.join().wait()[0] == 3
    with pytest.raises(Failure, match="silent for so long"):
        roster.add(2, 1, torch.ones(1))


def test_when_all_are_lost_who_joins_begins_the_last_round_again():
    roster = DrivenRoster(2)
    roster.open_for_joining(0, "first")
    for worker in (0, 1):
        roster.add(worker, 1, torch.ones(1))
    roster.lose(0)
    joining = roster.join()
    assert not joining.done()  # worker 1 is beyond that round
    roster.lose(1)
    worker, now = joining.wait()
    assert (worker, now.sums, now.state) == (2, 0, "first")
    assert roster.add(2, 1, torch.ones(1)).wait().tolist() == [1]  # and not the sum of those before


def test_who_comes_too_late_is_told_so():
    roster = DrivenRoster(1)
    joining = roster.join()
    roster.close("the job is over")
    with pytest.raises(Failure, match="the job is over"):
        joining.wait()


def test_summands_that_are_kept_apart_are_rows_in_the_order_of_the_workers():
    roster = DrivenRoster(2)
    roster.add(1, 1, torch.tensor([1.0, 5.0]), as_rows=True)
    assert roster.add(0, 1, torch.tensor([0.0, 6.0]), as_rows=True).wait().tolist() == [
        [0, 6],
        [1, 5],
    ]


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(1, 3), max_size=2),
    st.randoms(use_true_random=False),
)
def test_all_get_the_same_sums_in_whatever_order_they_come_or_go(workers, sums, leavers, rng):
    """Who is counted in a sum gave its summand; who is not counted was lost; nobody waits for ever."""
    roster = DrivenRoster(workers)
    at = dict.fromkeys(range(workers), 0)  # worker -> its last sum
    totals = {}
    leavers = {worker for worker in leavers if worker < workers}
    while any(number < sums or not totals[worker].done() for worker, number in at.items()):
        if leavers and rng.random() < 0.3:
            worker = leavers.pop()
            roster.lose(worker)
            del at[worker]
            continue
        ready = [w for w, n in at.items() if n < sums and (w not in totals or totals[w].done())]
        assert ready, "all wait for each other"
        worker = rng.choice(ready)
        at[worker] += 1
        totals[worker] = roster.add(worker, at[worker], one_hot(worker, workers))
        seen = {
            tuple(totals[w].wait().tolist())
            for w, n in at.items()
            if n == at[worker] and totals[w].done()
        }
        assert len(seen) <= 1
    for worker in at:
        counted = totals[worker].wait().tolist()
        assert all(counted[other] for other in at)


@pytest.mark.parametrize(
    ("other", "as_rows"), [(torch.ones(2), False), (torch.ones(1), True)], ids=["shapes", "kinds"]
)
def test_workers_that_give_what_cannot_be_added_up_are_all_told(other, as_rows):
    roster = Roster(2)
    assert roster.add(0, 1, torch.ones(1)) == {}
    answers = roster.add(1, 1, other, as_rows)
    assert set(answers) == {(1, 0), (1, 1)}
    assert all(str(answer) == UNLIKE for answer in answers.values())
    roster.add(0, 2, torch.ones(1))
    assert roster.add(1, 2, torch.ones(1))[2, 0].item() == 2
