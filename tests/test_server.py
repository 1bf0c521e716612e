"""The parameter server, driven with plain calls: exact sums, whatever order pushes come in and however often."""

import sys
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.config import RunConfig
from hvdtrain.data.sampling import part
from hvdtrain.errors import Failure
from hvdtrain.modes.ps_ssp import StaleSynchronous
from hvdtrain.modes.ps_sync import Synchronous
from hvdtrain.optim import make_optimizer
from hvdtrain.ps.server import Bucket, Push

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = RunConfig(optimizer="sgd", momentum=0.0)
READER = 9  # a worker that pushes nothing
LR = 0.125  # a power of two: with whole gradients, and 1, 2 or 4 workers, every sum below is exact in float32


def sync(workers, scale=1.0):
    return Synchronous(workers, RunConfig())


def asynchronous(workers, scale=1.0, **options):
    """`scale` of the learning rate: 1/workers or 1."""
    assert scale in (1.0, 1 / workers)
    config = RunConfig(push_scale="none" if scale == 1.0 else "mean", **options)
    return StaleSynchronous(workers, config, staleness=None)


def stale(workers, staleness, push_scale="mean"):
    return StaleSynchronous(workers, RunConfig(push_scale=push_scale), staleness)


def make(policy, weights=(1.0, 2.0), config=PLAIN, **more):
    return Bucket(torch.tensor(weights), lambda p: make_optimizer(config, p), policy, **more)


def push(worker, step, gradient, version=0, lr=LR):
    return Push(worker, step, version, lr, torch.tensor(gradient, dtype=torch.float32))


def now(future):
    """The answer, which must be there already."""
    assert future.done()
    return future.result()


def holds(answer, version, staleness, weights):
    assert (answer.version, answer.staleness, answer.weights.tolist()) == (version, staleness, list(weights))


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


# Any order: each worker pushes a step when it has the answer to the one before, while old pushes come again


def gradients_of(worker, step):
    return [float((3 * worker + 5 * step) % 7 - 3), float((worker * step) % 5)]


class Crowd:
    """Workers whose messages arrive in an order that `rng` chooses, some of them more than once."""

    def __init__(self, bucket, workers, steps, rng):
        self.bucket, self.steps, self.rng = bucket, steps, rng
        self.next = dict.fromkeys(range(workers), 1)  # worker -> its next step
        self.read = dict.fromkeys(range(workers), 0)  # worker -> the version it holds
        self.open = {}  # worker -> the future of its push
        self.answers = []  # (step, answer) as each worker got it
        self.sent = []  # all pushes, any of which may come again

    def events(self):
        """Yields ('new' or 'again', worker, step, version read, future) as long as any worker has steps to go."""
        while True:
            for worker, future in list(self.open.items()):
                if future.done():
                    answer = future.result()
                    self.answers.append((self.next[worker] - 1, replace(answer, weights=answer.weights.clone())))
                    self.read[worker] = answer.version
                    del self.open[worker]
            ready = [w for w, step in self.next.items() if step <= self.steps and w not in self.open]
            if not ready and not self.open:
                return
            assert ready, "every worker waits for another"
            if self.sent and self.rng.random() < 0.4:  # a duplicate, or sent again since the answer got lost
                worker, step, version = self.rng.choice(self.sent)
                yield "again", worker, step, version, self._push(worker, step, version)
                continue
            worker = self.rng.choice(ready)
            step, version = self.next[worker], self.read[worker]
            self.open[worker] = future = self._push(worker, step, version)
            self.sent.append((worker, step, version))
            self.next[worker] += 1
            yield "new", worker, step, version, future

    def _push(self, worker, step, version):
        return self.bucket.push(push(worker, step, gradients_of(worker, step), version))


def mean_gradient(workers, step):
    return torch.tensor([gradients_of(w, step) for w in range(workers)]).mean(0)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 6), st.randoms(use_true_random=False))
def test_sync_applies_one_update_a_step_in_any_order(workers, steps, rng):
    bucket = make(sync(workers))
    expected = [torch.tensor([1.0, 2.0])]
    for step in range(1, steps + 1):
        expected.append(expected[-1] - LR * mean_gradient(workers, step))
    arrived = dict.fromkeys(range(steps + 1), 0)
    crowd = Crowd(bucket, workers, steps, rng)
    for kind, _, step, _, future in crowd.events():
        arrived[step] += kind == "new"
        complete = sum(n == workers for n in arrived.values())
        assert bucket.version == complete
        assert torch.equal(bucket.read(READER).weights, expected[complete])
        if kind == "new":
            assert future.done() == (step <= complete)
    assert bucket.version == steps
    assert len(crowd.answers) == workers * steps
    for step, answer in crowd.answers:
        assert (answer.staleness, answer.version) == (0, step)
        assert torch.equal(answer.weights, expected[answer.version])


@given(st.sampled_from([1, 2, 4]), st.integers(1, 6), st.randoms(use_true_random=False))
def test_async_applies_each_push_once_in_any_order(workers, steps, rng):
    bucket = make(asynchronous(workers, 1 / workers))
    history = [torch.tensor([1.0, 2.0])]
    crowd = Crowd(bucket, workers, steps, rng)
    for kind, worker, step, read, future in crowd.events():
        answer = now(future)
        if kind == "new":
            assert answer.staleness == len(history) - 1 - read
            history.append(history[-1] - LR / workers * torch.tensor(gradients_of(worker, step)))
        assert answer.version == bucket.version == len(history) - 1
    assert bucket.version == workers * steps
    assert len(crowd.answers) == workers * steps
    for _, answer in crowd.answers:
        assert torch.equal(answer.weights, history[answer.version])


@given(st.sampled_from([1, 2, 4]), st.integers(0, 3), st.integers(1, 8), st.randoms(use_true_random=False))
def test_ssp_holds_back_who_is_more_than_s_ahead_and_nobody_else(workers, staleness, steps, rng):
    bucket = make(stale(workers, staleness))
    clocks = dict.fromkeys(range(workers), 0)
    open_ = {}
    for kind, worker, step, _, future in Crowd(bucket, workers, steps, rng).events():
        if kind == "new":
            clocks[worker] = step
            open_[worker] = (step, future)
        slowest = min(clocks.values())
        for own_step, own in open_.values():
            assert own.done() == (own_step - slowest <= staleness)
        # Who goes on computes step + 1: never more than s + 1 pushes beyond the slowest's.
        assert max(clocks.values()) - slowest <= staleness + 1
    assert bucket.version == workers * steps


@given(st.integers(2, 4), st.integers(0, 3), st.integers(1, 8), st.randoms(use_true_random=False))
def test_ssp_goes_on_without_a_worker_that_is_lost_and_waits_for_the_slowest_of_the_others(
    workers, staleness, steps, rng
):
    bucket = make(stale(workers, staleness))
    lost, when = rng.randrange(workers), rng.randrange(workers * steps)
    crowd = Crowd(bucket, workers, steps, rng)
    pushed = dict.fromkeys(range(workers), 0)
    for kind, worker, step, _, _ in crowd.events():
        if kind == "new":
            pushed[worker] = step
        if sum(pushed.values()) > when and lost in pushed:
            bucket.lose(lost)
            gone = pushed.pop(lost)
            del crowd.next[lost]
            crowd.open.pop(lost, None)
            crowd.sent = [sent for sent in crowd.sent if sent[0] != lost]
            with pytest.raises(Failure, match="silent for so long"):
                bucket.push(push(lost, gone + 1, [0.0, 0.0]))
        if lost not in pushed:
            for own, future in crowd.open.items():
                assert future.done() == (pushed[own] - min(pushed.values()) <= staleness)
    assert set(pushed.values()) == {steps}
    assert bucket.version == steps * (workers - 1) + gone


def test_sync_cannot_go_on_without_a_worker():
    with pytest.raises(Failure, match="every step of ps-sync needs a push from every worker"):
        make(sync(2)).lose(1)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 6), st.randoms(use_true_random=False))
def test_ssp_without_slack_is_bulk_synchronous_for_plain_sgd(workers, steps, rng):
    bucket = make(stale(workers, 0))
    expected = [torch.tensor([1.0, 2.0])]
    for step in range(1, steps + 1):
        expected.append(expected[-1] - LR * mean_gradient(workers, step))
    crowd = Crowd(bucket, workers, steps, rng)
    for _ in crowd.events():
        pass
    for step, answer in crowd.answers:  # all workers read the same weights, and those that sync would have given them
        assert torch.equal(answer.weights, expected[step])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", [sync, asynchronous])
def test_real_threads_that_send_everything_twice(policy, request):
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # let threads get into each other's way as often as they can
    workers, steps = 8, 40
    bucket = make(policy(workers, 1 / workers), [0.0, 0.0])
    versions, errors = [], []

    def work(worker):
        try:
            version = 0
            for step in range(1, steps + 1):
                message = [push(worker, step, gradients_of(worker, step), version) for _ in range(2)]
                first, second = (bucket.push(m) for m in message)
                version = first.result(timeout=30).version
                assert second.result(timeout=30).version >= version
                versions.append(version)
                bucket.read(READER)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[worker], daemon=True) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    assert not errors
    expected = -LR * sum(mean_gradient(workers, step) for step in range(1, steps + 1))
    assert bucket.read(READER).weights.tolist() == expected.tolist()
    updates, answers_each = (steps, workers) if policy is sync else (workers * steps, 1)
    assert bucket.version == updates
    assert sorted(versions) == [v for v in range(1, updates + 1) for _ in range(answers_each)]


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
