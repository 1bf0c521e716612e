"""The parameter server, driven with plain calls: exact sums, by hand and over any number of servers."""

import pytest
import torch
from buckets import LR, PLAIN, READER, asynchronous, holds, make, now, push, stale, sync
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.config import RunConfig
from hvdtrain.data.sampling import part
from hvdtrain.optim import make_optimizer
from hvdtrain.ps.server import Bucket, Push

pytestmark = pytest.mark.usefixtures("one_thread")

# Bulk-synchronous, by hand


def test_sync_waits_for_every_worker_and_applies_the_mean_once():
    bucket = make(sync(2))
    first = bucket.push(push(1, 1, [8.0, 0.0]))
    assert not first.done()
    holds(bucket.read(READER), 0, 0, [1, 2])
    second = bucket.push(push(0, 1, [0.0, 16.0]))
    for future in (first, second):
        holds(now(future), 1, 0, [1 - LR * 4, 2 - LR * 8])
    third = bucket.push(push(0, 2, [8.0, 8.0], version=1))
    assert not third.done()
    bucket.push(push(1, 2, [8.0, 8.0], version=1))
    holds(now(third), 2, 0, [0.5 - LR * 8, 1 - LR * 8])


def test_sync_with_one_worker_answers_at_once():
    holds(now(make(sync(1)).push(push(0, 1, [8.0, 8.0]))), 1, 0, [0, 1])


def test_sync_takes_the_learning_rate_of_the_step():
    bucket = make(sync(1))
    bucket.push(push(0, 1, [1.0, 1.0], lr=0.5))
    holds(now(bucket.push(push(0, 2, [1.0, 1.0], version=1, lr=0.25))), 2, 0, [0.25, 1.25])


def test_sync_takes_a_push_that_is_sent_again_once_and_answers_both():
    bucket = make(sync(2))
    waiting = [bucket.push(push(0, 1, [8.0, 8.0])) for _ in range(3)]
    assert not any(future.done() for future in waiting)
    waiting.append(bucket.push(push(1, 1, [0.0, 0.0])))
    for future in waiting:
        holds(now(future), 1, 0, [0.5, 1.5])
    late = bucket.push(push(0, 1, [8.0, 8.0]))
    holds(now(late), 1, 0, [0.5, 1.5])
    # Not even while the worker waits for its next step.
    ahead = bucket.push(push(0, 2, [8.0, 8.0], version=1))
    assert bucket.push(push(0, 1, [8.0, 8.0])) is ahead
    assert not ahead.done()


def test_sync_adds_up_in_the_order_of_workers_whoever_comes_first():
    """Floating-point sums depend on the order: the same run twice must give the same bits."""
    gradients = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        bucket = make(sync(4), [0.0] * 1000)
        for worker in order:
            bucket.push(push(worker, 1, gradients[worker].tolist()))
        results.append(bucket.read(READER).weights)
    assert torch.equal(*results)


# Asynchronous, by hand


def test_async_applies_each_push_when_it_comes():
    bucket = make(asynchronous(2))
    holds(now(bucket.push(push(1, 1, [8.0, 0.0]))), 1, 0, [0, 2])
    holds(now(bucket.push(push(0, 1, [0.0, 8.0]))), 2, 1, [0, 1])
    holds(now(bucket.push(push(1, 2, [8.0, 8.0], version=1))), 3, 1, [-1, 0])
    holds(bucket.read(READER), 3, 0, [-1, 0])


def test_async_staleness_is_the_version_applied_to_minus_the_version_read():
    bucket = make(asynchronous(5))
    stale = [now(bucket.push(push(worker, 1, [0.0, 0.0]))).staleness for worker in range(5)]
    assert stale == [0, 1, 2, 3, 4]
    assert now(bucket.push(push(0, 2, [0.0, 0.0], version=1))).staleness == 4
    assert now(bucket.push(push(0, 3, [0.0, 0.0], version=6))).staleness == 0


def test_async_scales_the_learning_rate():
    holds(now(make(asynchronous(4, 0.25)).push(push(0, 1, [8.0, 8.0]))), 1, 0, [0.75, 1.75])


def test_async_scales_under_adam_too():
    """A scaled gradient would not do: Adam's step does not depend on it."""
    bucket = make(asynchronous(4, 0.25), config=RunConfig(optimizer="adam"))
    moved = now(bucket.push(push(0, 1, [8.0, -3.0]))).weights - torch.tensor([1.0, 2.0])
    torch.testing.assert_close(moved, torch.tensor([-LR / 4, LR / 4]))


def test_a_push_that_is_sent_again_is_not_applied_again_and_gets_the_newest_weights():
    bucket = make(asynchronous(2))
    first = bucket.push(push(0, 1, [8.0, 8.0]))
    bucket.push(push(1, 1, [8.0, 8.0]))
    holds(now(bucket.push(push(0, 1, [8.0, 8.0]))), 2, 0, [-1, 0])
    holds(now(bucket.answer(0)), 2, 0, [-1, 0])
    holds(now(first), 1, 0, [0, 1])
    holds(bucket.read(READER), 2, 0, [-1, 0])


def test_the_ledger_has_every_push_once_in_the_order_of_application():
    told = []
    bucket = make(asynchronous(2), ledger=told.append)
    for worker, step, version in [(1, 1, 0), (0, 1, 0), (0, 1, 0), (1, 2, 1)]:
        bucket.push(push(worker, step, [1.0, 1.0], version))
    assert [(a.worker, a.step, a.version_read, a.version) for a in told] == [(1, 1, 0, 1), (0, 1, 0, 2), (1, 2, 1, 3)]


# Remedies for staleness, by hand


def test_the_learning_rate_can_be_divided_by_the_staleness():
    bucket = make(asynchronous(4, staleness_lr=True))
    for worker in range(4):
        bucket.push(push(worker, 1, [8.0, 0.0]))  # staleness 0, 1, 2, 3
    assert bucket.read(READER).weights.tolist() == pytest.approx([1 - (1 + 1 + 1 / 2 + 1 / 3), 2])


def test_delay_compensation_adds_the_squared_gradient_times_how_far_the_weights_have_moved():
    bucket = make(asynchronous(2, delay_compensation=0.5))
    bucket.push(push(0, 1, [8.0, 0.0]))  # weights 1 -> 0
    bucket.push(push(1, 1, [4.0, 8.0]))  # read at 1, applied at 0: 4 + 0.5 * 16 * (0 - 1) = -4
    assert bucket.read(READER).weights.tolist() == [0.5, 1]
    bucket.push(push(1, 2, [4.0, 0.0], version=2))  # nobody moved them since its answer
    assert bucket.read(READER).weights.tolist() == [0, 1]


# Stale-synchronous, by hand


def test_ssp_lets_a_worker_be_so_many_steps_ahead_and_no_more():
    bucket = make(stale(2, staleness=2))
    assert all(bucket.push(push(0, step, [0.0, 0.0], step - 1)).done() for step in (1, 2))
    ahead = bucket.push(push(0, 3, [0.0, 0.0], 2))
    assert not ahead.done()
    bucket.push(push(1, 1, [0.0, 0.0]))
    assert now(ahead).version == 4


def test_ssp_waits_for_nobody_who_rests_and_again_for_those_who_have_rested():
    bucket = make(stale(2, staleness=0))
    ahead = bucket.push(push(0, 1, [0.0, 0.0]))
    assert not ahead.done()
    bucket.rest(1, 0)
    assert ahead.done()
    bucket.rest(0, 1)
    assert not bucket.push(push(0, 2, [0.0, 0.0], 1)).done()


def test_a_rest_that_overtakes_the_push_before_it_counts_after_that():
    bucket = make(stale(2, staleness=0))
    bucket.rest(1, 1)
    ahead = bucket.push(push(0, 1, [0.0, 0.0]))
    assert not ahead.done()
    second = bucket.push(push(0, 1, [0.0, 0.0]))  # sent again
    bucket.push(push(1, 1, [0.0, 0.0]))
    assert ahead.done() and second.done()
    assert bucket.push(push(0, 2, [0.0, 0.0], 2)).done()


def test_delay_compensation_is_for_what_has_changed_since_the_worker_read_the_weights():
    bucket = make(asynchronous(2, delay_compensation=1.0), weights=[0.0, 0.0])
    bucket.push(push(1, 1, [8.0, 8.0]))
    version = bucket.read(0).version
    before = bucket.read(READER).weights.clone()
    bucket.push(push(0, 1, [8.0, 8.0], version))
    assert torch.equal(bucket.read(READER).weights, before - LR * 8.0)


@pytest.mark.parametrize("policy", [sync, asynchronous])
def test_an_answer_stays_as_it_is_until_its_worker_pushes_again(policy):
    given_weights = torch.tensor([1.0, 2.0])
    bucket = Bucket(given_weights, lambda p: make_optimizer(PLAIN, p), policy(2))
    before = bucket.read(READER)
    waiting = [bucket.push(push(worker, 1, [8.0, 8.0])) for worker in (0, 1)]
    first, second = map(now, waiting)
    bucket.push(push(1, 2, [8.0, 8.0], version=second.version))
    bucket.push(push(1, 3, [8.0, 8.0], version=second.version))
    holds(before, 0, 0, [1, 2])
    holds(first, 1, 0, [0, 1])


def test_one_worker_needs_no_copy_of_the_weights():
    given_weights = torch.tensor([1.0, 2.0])
    bucket = Bucket(given_weights, lambda p: make_optimizer(PLAIN, p), asynchronous(1))
    for step in (1, 2):
        answer = now(bucket.push(push(0, step, [8.0, 8.0], version=step - 1)))
    assert answer.weights.data_ptr() == given_weights.data_ptr()
    assert given_weights.tolist() == [-1, 0]


# Cut over servers


TORCH = {
    "nesterov": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, weight_decay=0.01, nesterov=True),
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
    named = {"optimizer": "sgd", "nesterov": True} if optimizer == "nesterov" else {"optimizer": optimizer}
    config = RunConfig(**named, momentum=0.9, weight_decay=0.01)
    ranges = [part(size, server, servers) for server in range(servers)]
    buckets = [
        Bucket(whole[r.start : r.stop].clone(), lambda p: make_optimizer(config, p), sync(workers)) for r in ranges
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
                bucket.push(Push(worker, step, step - 1, lr, gradients[worker, r.start : r.stop].clone()))
    together = torch.cat([bucket.read(READER).weights for bucket in buckets])
    torch.testing.assert_close(together, reference.detach(), rtol=1e-5, atol=1e-6)
