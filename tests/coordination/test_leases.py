"""Shares of an epoch leased to workers at any speed, some of which are lost: with plain calls."""

import pytest
from helpers.parts import DrivenLeases
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.errors import Failure
from hvdtrain.data.sampling import BatchSampler


def test_who_is_ready_gets_the_next_share_and_all_wait_for_the_last():
    leases = DrivenLeases()
    assert [leases.lease(0, 1, 0, 4), leases.lease(1, 1, 0, 4), leases.lease(0, 2, 0, 4)] == [
        0,
        1,
        2,
    ]
    leases.finished(0, 1)
    assert leases.lease(0, 3, 0, 4) == 3
    assert leases.lease(0, 4, 0, 4) is None
    fast = leases.await_lease(0, 4)
    leases.finished(0, 3)
    assert not fast.done()  # worker 1 has share 1 still
    leases.finished(1, 1)
    assert fast.value() == (None, 4)
    assert leases.await_lease(1, 2).value() == (None, 4)
    assert leases.lease(0, 4, 4, 8) == 4  # the next round


def test_a_worker_that_was_given_up_gets_no_share():
    leases = DrivenLeases()
    leases.lease(0, 1, 0, 4)
    leases.lose(0)
    with pytest.raises(Failure, match="silent for so long"):
        leases.lease(0, 2, 0, 4)
    with pytest.raises(Failure, match="silent for so long"):
        leases.await_lease(0, 2)
    assert leases.lease(1, 1, 0, 4) == 0


def test_samples_are_those_of_leases_that_a_worker_has_finished_itself():
    leases = DrivenLeases(workers=3)
    leases.know_sizes({"samples": 33, "batch_size": 33})  # shares of 11
    assert [leases.lease(worker, step, 0, 4) for worker, step in ((0, 1), (1, 1), (0, 2))] == [
        0,
        1,
        2,
    ]
    leases.finished(0, 1)
    leases.lose(0)
    leases.finished(0, 2)  # comes late: share 2 is another's already
    leases.finished(1, 1)
    assert leases.part.samples == {0: 11, 1: 11}
    assert leases.lease(1, 2, 0, 4) == 2


def test_samples_count_of_shares_that_were_finished_before_their_sizes_were_known():
    """The worker that leads tells the sizes, and another may be faster."""
    leases = DrivenLeases(workers=3)
    leases.lease(1, 1, 0, 6)
    leases.lease(2, 1, 0, 6)
    leases.finished(1, 1)
    leases.finished(2, 1)
    assert leases.part.samples == {}
    leases.know_sizes({"samples": 33, "batch_size": 33})
    leases.know_sizes({"samples": 33, "batch_size": 33})
    assert leases.part.samples == {1: 11, 2: 11}


def test_samples_of_local_steps_are_those_of_the_shares_in_them():
    """Three workers share eight samples as 2, 3 and 3, at each of two steps; the fifth step, the
    epoch's last, has one. The job goes on after the first step, and ends with the eighth.
    """
    leases = DrivenLeases(workers=3)
    leases.know_sizes({"samples": 33, "batch_size": 8, "every": 2, "after": 1, "until": 8})
    # as the next epoch begins
    leases.know_sizes({"samples": 33, "batch_size": 8, "every": 2, "after": 5, "until": 8})
    sampler = BatchSampler(33, 8, 0, 0, 3)
    for worker in range(3):
        leased = [leases.lease(worker, step, 0, 15) for step in range(1, 6)]
        leases.finished(worker, 5)
        own = [
            (step, share % 3)
            for share in leased
            for step in sampler.steps_of_round(share // 3, 2, 8)
        ]
        trained = sum(sampler.share(3 * step + slot).counted for step, slot in own if step >= 1)
        assert leases.part.samples[worker] == trained > 0


def test_a_pause_ends_the_round_after_the_global_batch_that_was_begun():
    leases = DrivenLeases(workers=3)
    assert [leases.lease(0, step, 0, 90) for step in (1, 2, 3, 4)] == [0, 1, 2, 3]
    leases.pause_leases()
    assert [leases.lease(0, step, 0, 90) for step in (5, 6, 7)] == [4, 5, None]
    leases.finished(0, 6)
    assert leases.await_lease(0, 7).value() == (None, 6)
    assert leases.lease(0, 7, 6, 90) == 6


def test_a_pause_before_the_first_share_lets_one_global_batch_through():
    """Or workers that want a decision after every step would never take one."""
    leases = DrivenLeases(workers=2)
    assert leases.lease(0, 1, 30, 60) == 30
    leases.finished(0, 1)
    leases.pause_leases()
    assert [leases.lease(0, step, 30, 60) for step in (2, 3)] == [31, None]


def test_where_shares_are_fixed_a_worker_has_those_of_its_number_and_of_lost_workers():
    leases = DrivenLeases(workers=2, fixed=True)
    assert [leases.lease(0, step, 0, 4) for step in (1, 2, 3)] == [0, 2, None]
    leases.finished(0, 2)
    waiting = leases.await_lease(0, 3)
    assert leases.lease(1, 1, 0, 4) == 1 and not waiting.done()
    leases.lose(1)
    assert waiting.value()[0] == 1
    assert leases.lease(0, 4, 0, 4) == 3
    leases.finished(0, 4)
    assert leases.lease(0, 5, 0, 4) is None and leases.await_lease(0, 5).value() == (None, 4)


@pytest.mark.timeout(60)
@given(
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sets(st.integers(1, 3), max_size=3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_each_share_is_trained_on_once_whoever_is_fast_or_lost(
    workers, batches, rounds, losses, fixed, rng
):
    leases, trained = DrivenLeases(workers, fixed=fixed), []
    clocks = dict.fromkeys(range(workers), 0)
    losses = {worker for worker in losses if worker < workers}
    for number in range(rounds):
        begin, end = number * batches * workers, (number + 1) * batches * workers
        holding, waiting, over = {}, {}, set()
        while over != clocks.keys():
            worker = rng.choice(sorted(clocks.keys() - over))
            if worker in losses and rng.random() < 0.1:
                losses.discard(worker)
                del clocks[worker]
                holding.pop(worker, None)
                waiting.pop(worker, None)
                leases.lose(worker)
            elif worker in holding:
                clocks[worker] += 1
                trained.append(holding.pop(worker))
                leases.finished(worker, clocks[worker])
            elif worker in waiting:
                if waiting[worker].done():
                    share, after = waiting.pop(worker).value()
                    if share is None:
                        assert after == end
                        over.add(worker)
                    else:
                        holding[worker] = share
            else:
                share = leases.lease(worker, clocks[worker] + 1, begin, end)
                if share is None:
                    waiting[worker] = leases.await_lease(worker, clocks[worker] + 1)
                else:
                    holding[worker] = share
        assert sorted(trained) == list(range(end))
