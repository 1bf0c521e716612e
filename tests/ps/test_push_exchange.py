"""A worker's end of the exchange, joined to a server by plain calls in place of the wire."""

import threading

import pytest
import torch
from helpers.buckets import LR, make_server, stale, sync

from hvdtrain.job.buckets.partition import cut
from hvdtrain.job.ps import push_exchange
from hvdtrain.job.ps.push_exchange import PushExchange
from hvdtrain.job.wire.requests import as_future

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = [4] * 6  # of the parameters, each a bucket


@pytest.fixture
def join(monkeypatch):
    """Workers of servers with this policy, with room for one bucket under way each; and the buckets
    they push: their numbers, of two servers with that of the server.
    """
    monkeypatch.setattr(push_exchange, "UNDER_WAY", 0)

    def joined(workers, policy, servers=1):
        pieces, pushed = cut(SIZES, servers, 4), [[] for _ in range(workers)]
        joined_servers = [make_server(policy, workers) for _ in range(servers)]
        for piece in pieces:
            joined_servers[piece.server].install(piece.number, torch.zeros(4))

        class Wire:
            condition = threading.Condition

            def call(self, rank, method, number, push):
                pushed[push.worker].append(number if servers == 1 else (rank, number))
                return as_future(getattr(joined_servers[rank], method)(number, push))

        own = [
            PushExchange(
                Wire(),
                number,
                workers,
                pieces,
                SIZES,
                torch.zeros(sum(SIZES)),
                "none",
                staged=False,
            )
            for number in range(workers)
        ]
        return own, pushed

    return joined


def take(worker, step):
    """Begin a step and push: the last layer's gradient is there first."""
    worker.begin_step(step, LR)
    for parameter in reversed(range(len(SIZES))):
        worker.bucketer.put(parameter, torch.ones(4))


def weights(worker):
    return torch.cat([lane.weights for lane in worker.lanes])


@pytest.mark.parametrize("policy", [lambda: sync(2), lambda: stale(2, staleness=0)])
def test_workers_that_are_ready_at_different_times_do_not_wait_for_each_other_in_a_circle(
    join, policy
):
    """The late one pushes its last bucket while the other, which has room for one more, has gone on
    to the first.
    """
    (early, late), pushed = join(2, policy)
    for step in (1, 2):
        for worker in (early, late):
            take(worker, step)
        for worker in (early, late):
            worker.wait_for_all()
            assert worker.context.status.pending == 0
            torch.testing.assert_close(weights(worker), torch.full((24,), -LR * step))
    assert [sorted(numbers) for numbers in pushed] == [sorted([*range(6), *range(6)])] * 2
    assert pushed[0][:2] == [5, 4] and pushed[0][2] == 0  # what forward needs first overtakes


def test_a_worker_that_has_begun_no_step_has_nothing_to_wait_for(join):
    """The others may have taken all shares of its first round."""
    (idle,), _ = join(1, lambda: sync(1))
    idle.wait_until_answered()


def test_all_workers_together_have_so_many_bytes_under_way(join):
    """16 bytes a bucket: two of them fit beside the one for which there is always room."""
    (alone, _), pushed = join(2, lambda: sync(2))
    alone.queues[0].room = 32
    take(alone, 1)
    assert pushed[0] == [5, 4, 3]


def test_a_server_is_pushed_to_while_another_has_all_that_there_is_room_for(join):
    (early, late), pushed = join(2, lambda: sync(2), servers=2)
    take(early, 1)
    # one for which there is room, and one more, for each
    assert pushed[0] == [
        (1, 2),
        (1, 1),
        (0, 2),
        (0, 1),
    ]
    take(late, 1)
    for worker in (early, late):
        worker.wait_for_all()
        torch.testing.assert_close(weights(worker), torch.full((24,), -LR))


def test_a_worker_that_was_dropped_knows_the_last_step_that_is_over_everywhere(join):
    (first, second, late), _ = join(3, lambda: sync(3, backup=1))
    for step in (1, 2, 3):
        for worker in (first, second):
            take(worker, step)
            assert worker.last_closed_step() == 0
    take(late, 1)
    assert late.last_closed_step() == 3
    assert late.context.status.dropped == len(SIZES)
    assert torch.equal(weights(late), weights(first))
