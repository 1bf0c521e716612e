"""The parameter server, driven with plain calls: exact sums, by hand and over any number of
servers.
"""

import pytest
import torch
from helpers.buckets import (
    LR,
    PLAIN,
    READER,
    Driven,
    answered,
    asynchronous,
    holds,
    make,
    push,
    softsync,
    stale,
    sync,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.optimizers import make_optimizer
from hvdtrain.base.numerics.split import even_range
from hvdtrain.job.ps.bucket import Bucket
from hvdtrain.job.wire.messages import Push

pytestmark = pytest.mark.usefixtures("one_thread")


def test_sync_adds_up_in_the_order_of_workers_whoever_comes_first():
    """Floating-point sums depend on the order: the same run twice must give the same bits."""
    gradients = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        bucket = make(sync(4), [0.0] * 1000)
        for worker in order:
            bucket.push(push(worker, 1, gradients[worker].tolist()))
        results.append(bucket.pull(READER).weights)
    assert torch.equal(*results)


# Bulk-synchronous with backup workers, by hand


def test_after_a_snapshot_backup_workers_know_which_steps_are_over():
    bucket = make(sync(2, backup=1))
    bucket.resume(7, {})
    assert answered(bucket, push(0, 8, [8.0, 8.0])).version == 1
    assert answered(bucket, push(1, 8, [8.0, 8.0])).dropped == 8


# Asynchronous, by hand


def test_async_scales_under_adam_too():
    """A scaled gradient would not do: Adam's step does not depend on it."""
    bucket = make(asynchronous(4, 0.25), config=RunConfig(optimizer="adam"))
    moved = answered(bucket, push(0, 1, [8.0, -3.0])).weights - torch.tensor([1.0, 2.0])
    torch.testing.assert_close(moved, torch.tensor([-LR / 4, LR / 4]))


# As many pushes as there are workers make a step, by hand


def test_softsync_sends_workers_the_weights_one_more_step_ahead_and_evaluates_them_as_they_are():
    bucket = make(softsync(2, look_ahead=1.0))
    holds(answered(bucket, push(0, 1, [8.0, 0.0])), 0, 0, [1, 2])  # there was no step yet
    ahead = answered(bucket, push(1, 1, [8.0, 8.0]))
    holds(ahead, 1, 0, [1 - 2 * 1, 2 - 2 * 0.5])
    holds(bucket.pull(READER), 1, 0, [0, 1.5])
    holds(answered(bucket, push(0, 2, [0.0, 0.0])), 1, 1, [-1, 1])
    bucket.push(push(1, 2, [0.0, 0.0], 1))
    holds(ahead, 1, 0, [-1, 1])  # what was sent stays as it was
    holds(bucket.pull(READER), 2, 0, [0, 1.5])


@pytest.mark.parametrize(
    ("workers", "staleness", "options"),
    [(1, None, {}), (2, 0, {}), (2, None, {"delay_compensation": 0.5})],
)
def test_nobody_is_sent_weights_ahead_who_is_not_behind_or_has_another_remedy(
    workers, staleness, options
):
    bucket = make(softsync(workers, staleness, look_ahead=1.0, **options))
    for worker in range(workers):
        replies = bucket.push(push(worker, 1, [8.0, 8.0]))
    assert [answer.weights.tolist() for _, answer in replies] == [[0, 1]] * len(replies)


def test_softsync_takes_a_shorter_step_with_what_there_is_before_all_evaluate():
    bucket = make(softsync(4))
    bucket.push(push(0, 1, [8.0, 0.0]))
    assert bucket.idle(0, 1, at_barrier=True) == []
    bucket.idle(1, 0, at_barrier=True)
    bucket.idle(2, 0, at_barrier=True)
    holds(bucket.pull(READER), 0, 0, [1, 2])
    bucket.idle(3, 0, at_barrier=True)
    holds(bucket.pull(READER), 1, 0, [1 - LR * 8 / 4, 2])


def test_softsync_waits_for_no_push_of_a_worker_that_is_lost():
    bucket = make(softsync(2))
    bucket.push(push(0, 1, [8.0, 0.0]))
    bucket.idle(0, 1, at_barrier=True)
    bucket.lose(1)
    holds(bucket.pull(READER), 1, 0, [0.5, 2])
    bucket.push(push(0, 2, [8.0, 0.0]))
    holds(answered(bucket, push(0, 3, [8.0, 0.0])), 2, 1, [-0.5, 2])


# How far pushes move the weights, where one worker's gradients are mostly noise


def test_under_adam_n_pushes_are_an_averaged_step_and_move_less_far_where_each_is_a_step():
    """Its second moment then is of single pushes, which have N times the noise: √N less far."""
    together, summed, each = (
        moved(policy) for policy in (sync(4), softsync(4), asynchronous(4, 1 / 4))
    )
    assert summed / together == pytest.approx(1, abs=0.02)
    assert each / together == pytest.approx(1 / 2, abs=0.08)


def moved(policy):
    """How far along the signal of their gradients, 2,000 weights on average, 60 pushes of each of
    four workers move them. The noise of four averaged gradients is 1.
    """
    bucket = make(policy, [0.0] * 2000, RunConfig(optimizer="adam"))
    numbers, versions = torch.Generator().manual_seed(0), [0] * 4
    for step in range(1, 61):
        for worker in range(4):
            gradient = 0.03 + 2 * torch.randn(2000, generator=numbers)
            for own, answer in bucket.push(Push(worker, step, versions[worker], 1e-3, gradient)):
                versions[own] = answer.version
    return -bucket.pull(READER).weights.mean().item()


# Remedies for staleness, by hand


def test_the_learning_rate_can_be_divided_by_the_staleness():
    bucket = make(asynchronous(4, staleness_lr=True))
    for worker in range(4):
        bucket.push(push(worker, 1, [8.0, 0.0]))  # staleness 0, 1, 2, 3
    assert bucket.pull(READER).weights.tolist() == pytest.approx([1 - (1 + 1 + 1 / 2 + 1 / 3), 2])


def test_delay_compensation_adds_the_squared_gradient_times_how_far_the_weights_have_moved():
    bucket = make(asynchronous(2, delay_compensation=0.5))
    bucket.push(push(0, 1, [8.0, 0.0]))  # weights 1 -> 0
    bucket.push(push(1, 1, [4.0, 8.0]))  # read at 1, applied at 0: 4 + 0.5 * 16 * (0 - 1) = -4
    assert bucket.pull(READER).weights.tolist() == [0.5, 1]
    bucket.push(push(1, 2, [4.0, 0.0], version=2))  # nobody moved them since its answer
    assert bucket.pull(READER).weights.tolist() == [0, 1]


# Stale-synchronous, by hand


def workers_of(replies):
    return [worker for worker, _ in replies]


def test_ssp_waits_for_nobody_who_is_idle_and_again_for_those_who_were():
    bucket = make(stale(2, staleness=0))
    assert bucket.push(push(0, 1, [0.0, 0.0])) == []
    assert workers_of(bucket.idle(1, 0, at_barrier=True)) == [0]
    assert bucket.idle(0, 1, at_barrier=True) == []
    assert bucket.push(push(0, 2, [0.0, 0.0], 1)) == []


def test_workers_at_a_barrier_go_on_together_though_one_was_said_to_be_idle_before_its_last_push():
    bucket = make(softsync(2, staleness=0))
    for worker in (0, 1):
        bucket.push(push(worker, 1, [8.0, 0.0]))
        bucket.idle(worker, 1, at_barrier=True)
    bucket.idle(0, 2, at_barrier=True)  # overtakes the push before it
    assert bucket.push(push(0, 2, [8.0, 0.0], 1)) == []
    assert bucket.version == 1
    assert workers_of(bucket.push(push(1, 2, [8.0, 0.0], 1))) == [0, 1]


def test_a_worker_that_waits_for_a_lease_is_waited_for_by_nobody_though_all_were_idle():
    bucket = make(stale(2, staleness=0))
    for worker in (0, 1):
        bucket.push(push(worker, 1, [0.0, 0.0]))
        bucket.idle(worker, 1, at_barrier=False)
    # it has leased the share of one that was lost
    assert workers_of(bucket.push(push(0, 2, [0.0, 0.0], 2))) == [0]
    for worker, step in ((0, 2), (1, 1)):
        bucket.idle(worker, step, at_barrier=True)
    assert bucket.push(push(0, 3, [0.0, 0.0], 3)) == []


def test_idling_that_overtakes_the_push_before_it_counts_after_that():
    bucket = make(stale(2, staleness=0))
    assert bucket.idle(1, 1, at_barrier=True) == []
    assert bucket.push(push(0, 1, [0.0, 0.0])) == []
    assert bucket.push(push(0, 1, [0.0, 0.0])) == []  # sent again
    assert workers_of(bucket.push(push(1, 1, [0.0, 0.0]))) == [0, 1]
    assert workers_of(bucket.push(push(0, 2, [0.0, 0.0], 2))) == [0]


@pytest.mark.parametrize("policy", [sync, asynchronous])
def test_an_answer_stays_as_it_is_until_its_worker_pushes_again(policy):
    given_weights = torch.tensor([1.0, 2.0])
    bucket = Driven(Bucket(given_weights, lambda p: make_optimizer(PLAIN, p), policy(2)))
    before = bucket.pull(READER)
    replies = dict(reply for worker in (0, 1) for reply in bucket.push(push(worker, 1, [8.0, 8.0])))
    first, second = replies[0], replies[1]
    bucket.push(push(1, 2, [8.0, 8.0], version=second.version))
    bucket.push(push(1, 3, [8.0, 8.0], version=second.version))
    holds(before, 0, 0, [1, 2])
    holds(first, 1, 0, [0, 1])


# Cut over servers


TORCH = {
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=1.0, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1.0, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.01),
}


@settings(max_examples=30)
@pytest.mark.parametrize("optimizer", TORCH)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(9, 300), st.integers(0, 99))
def test_any_number_of_servers_gives_torchs_weights(optimizer, servers, workers, size, seed):
    numbers = torch.Generator().manual_seed(seed)
    whole = torch.randn(size, generator=numbers)
    named = (
        {"optimizer": "sgd", "nesterov": True}
        if optimizer == "nesterov"
        else {"optimizer": optimizer}
    )
    config = RunConfig(**named, momentum=0.9, weight_decay=0.01)
    ranges = [even_range(size, server, servers) for server in range(servers)]
    buckets = [
        Driven(
            Bucket(
                whole[r.start : r.stop].clone(), lambda p: make_optimizer(config, p), sync(workers)
            )
        )
        for r in ranges
    ]
    reference = whole.clone().requires_grad_()
    torchs = TORCH[optimizer]([reference])
    for step, lr in enumerate([0.1, 0.05, 0.02], 1):
        gradients = torch.randn(workers, size, generator=numbers)
        reference.grad = gradients.mean(0)
        torchs.param_groups[0]["lr"] = lr
        torchs.step()
        for worker in range(workers):
            for bucket, r in zip(buckets, ranges, strict=True):
                bucket.push(
                    Push(worker, step, step - 1, lr, gradients[worker, r.start : r.stop].clone())
                )
    together = torch.cat([bucket.pull(READER).weights for bucket in buckets])
    torch.testing.assert_close(together, reference.detach(), rtol=1e-5, atol=1e-6)


def test_a_share_counts_once_though_its_worker_was_lost_before_it_knew():
    """The server leases the share again: whoever trains on it pushes to the buckets that lack it."""
    lines = []
    bucket = make(asynchronous(2), ledger=lines.append)
    bucket.push(push(0, 1, [8, 8])._replace(share=4))
    bucket.lose(0)
    # what comes of a life that is over is nobody's
    with pytest.raises(Failure, match="silent for so long"):
        bucket.push(push(0, 2, [8, 8])._replace(share=6))
    again = answered(bucket, push(1, 1, [9, 9])._replace(share=4))
    holds(again, 1, 1, [0.0, 1.0])
    assert answered(bucket, push(1, 2, [8, 8], version=1)._replace(share=5)).version == 2
    assert [(line.worker, line.step, line.version) for line in lines] == [
        (0, 1, 1),
        (0, 2, None),
        (1, 1, None),
        (1, 2, 2),  # what the lost one had read for its next step, too
    ]
    bucket.lose(0)  # said by another server too
    bucket.lose(1)
    bucket.join(2, step=2)
    # and counts once for good
    assert answered(bucket, push(2, 3, [8, 8], version=2)._replace(share=4)).version == 2


def test_who_joins_is_the_one_that_others_wait_for():
    bucket = make(stale(2, 1))
    for step in (1, 2, 3):
        for worker in (0, 1):
            bucket.push(push(worker, step, [0, 0]))
    bucket.join(2, bucket.slowest(0))
    assert bucket.slowest(0) == 3
    for worker in (0, 1):
        assert bucket.push(push(worker, 4, [0, 0]))
    assert not bucket.push(push(0, 5, [0, 0]))
    assert {worker for worker, _ in bucket.push(push(2, 4, [0, 0]))} == {0, 2}


def test_one_more_cannot_join_where_every_step_needs_all():
    with pytest.raises(Failure, match="as many workers as it began with"):
        make(sync(2)).join(2, 0)
