"""The parameter server, driven with plain calls: exact sums, whatever order pushes come in and however often."""

import sys
import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.config import RunConfig
from hvdtrain.data.sampling import part
from hvdtrain.modes.ps_async import Asynchronous
from hvdtrain.modes.ps_sync import Synchronous
from hvdtrain.optim import make_optimizer
from hvdtrain.ps.server import Push, Shard

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = RunConfig(optimizer="sgd", momentum=0.0)
LR = 0.125  # a power of two: with whole gradients, and 1, 2 or 4 workers, every sum below is exact in float32


def make(policy, weights=(1.0, 2.0), config=PLAIN):
    return Shard(torch.tensor(weights), lambda p: make_optimizer(config, p), policy)


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
    shard = make(Synchronous(workers=2, scale=0.5))
    first = shard.push(push(1, 1, [8.0, 0.0]))
    assert not first.done()
    holds(shard.pull(), 0, 0, [1, 2])
    second = shard.push(push(0, 1, [0.0, 16.0]))
    for future in (first, second):
        holds(now(future), 1, 0, [1 - LR * 4, 2 - LR * 8])
    third = shard.push(push(0, 2, [8.0, 8.0], version=1))
    assert not third.done()
    shard.push(push(1, 2, [8.0, 8.0], version=1))
    holds(now(third), 2, 0, [0.5 - LR * 8, 1 - LR * 8])


def test_sync_with_one_worker_answers_at_once():
    holds(now(make(Synchronous(1, 1.0)).push(push(0, 1, [8.0, 8.0]))), 1, 0, [0, 1])


def test_sync_takes_the_learning_rate_of_the_step():
    shard = make(Synchronous(1, 1.0))
    shard.push(push(0, 1, [1.0, 1.0], lr=0.5))
    holds(now(shard.push(push(0, 2, [1.0, 1.0], version=1, lr=0.25))), 2, 0, [0.25, 1.25])


def test_sync_takes_a_push_that_is_sent_again_once_and_answers_both():
    shard = make(Synchronous(2, 1.0))
    waiting = [shard.push(push(0, 1, [8.0, 8.0])) for _ in range(3)]
    assert not any(future.done() for future in waiting)
    waiting.append(shard.push(push(1, 1, [0.0, 0.0])))
    for future in waiting:
        holds(now(future), 1, 0, [0.5, 1.5])
    late = shard.push(push(0, 1, [8.0, 8.0]))
    holds(now(late), 1, 0, [0.5, 1.5])
    # Not even while the worker waits for its next step.
    ahead = shard.push(push(0, 2, [8.0, 8.0], version=1))
    holds(now(shard.push(push(0, 1, [8.0, 8.0]))), 1, 0, [0.5, 1.5])
    assert not ahead.done()


def test_sync_adds_up_in_the_order_of_workers_whoever_comes_first():
    """Floating-point sums depend on the order: the same run twice must give the same bits."""
    gradients = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        shard = make(Synchronous(4, 1.0), [0.0] * 1000)
        for worker in order:
            shard.push(push(worker, 1, gradients[worker].tolist()))
        results.append(shard.pull().weights)
    assert torch.equal(*results)


# Asynchronous, by hand


def test_async_applies_each_push_when_it_comes():
    shard = make(Asynchronous(workers=2, scale=1.0))
    holds(now(shard.push(push(1, 1, [8.0, 0.0]))), 1, 0, [0, 2])
    holds(now(shard.push(push(0, 1, [0.0, 8.0]))), 2, 1, [0, 1])
    holds(now(shard.push(push(1, 2, [8.0, 8.0], version=1))), 3, 1, [-1, 0])
    holds(shard.pull(), 3, 0, [-1, 0])


def test_async_staleness_is_the_version_applied_to_minus_the_version_read():
    shard = make(Asynchronous(5, 1.0))
    stale = [now(shard.push(push(worker, 1, [0.0, 0.0]))).staleness for worker in range(5)]
    assert stale == [0, 1, 2, 3, 4]
    assert now(shard.push(push(0, 2, [0.0, 0.0], version=1))).staleness == 4
    assert now(shard.push(push(0, 3, [0.0, 0.0], version=6))).staleness == 0


def test_async_scales_the_learning_rate():
    holds(now(make(Asynchronous(4, 0.25)).push(push(0, 1, [8.0, 8.0]))), 1, 0, [0.75, 1.75])


def test_async_scales_under_adam_too():
    """A scaled gradient would not do: Adam's step does not depend on it."""
    shard = make(Asynchronous(4, 0.25), config=RunConfig(optimizer="adam"))
    moved = now(shard.push(push(0, 1, [8.0, -3.0]))).weights - torch.tensor([1.0, 2.0])
    torch.testing.assert_close(moved, torch.tensor([-LR / 4, LR / 4]))


def test_async_answers_a_push_that_is_sent_again_with_the_newest_weights_and_does_not_apply_it():
    shard = make(Asynchronous(2, 1.0))
    shard.push(push(0, 1, [8.0, 8.0]))
    shard.push(push(1, 1, [8.0, 8.0]))
    holds(now(shard.push(push(0, 1, [8.0, 8.0]))), 2, 0, [-1, 0])
    holds(shard.pull(), 2, 0, [-1, 0])


@pytest.mark.parametrize("policy", [Synchronous(1, 1.0), Asynchronous(1, 1.0)], ids=["sync", "async"])
def test_an_answer_is_a_snapshot(policy):
    given_weights = torch.tensor([1.0, 2.0])
    shard = Shard(given_weights, lambda p: make_optimizer(PLAIN, p), policy)
    before = shard.pull()
    first = now(shard.push(push(0, 1, [8.0, 8.0])))
    second = now(shard.push(push(0, 2, [8.0, 8.0], version=1)))
    holds(before, 0, 0, [1, 2])
    holds(first, 1, 0, [0, 1])
    holds(second, 2, 0, [-1, 0])
    assert given_weights.tolist() == [-1, 0]  # kept, not copied


# Any order: each worker pushes a step when it has the answer to the one before, while old pushes come again


def gradients_of(worker, step):
    return [float((3 * worker + 5 * step) % 7 - 3), float((worker * step) % 5)]


class Crowd:
    """Workers whose messages arrive in an order that `rng` chooses, some of them more than once."""

    def __init__(self, shard, workers, steps, rng):
        self.shard, self.steps, self.rng = shard, steps, rng
        self.next = dict.fromkeys(range(workers), 1)  # worker -> its next step
        self.read = dict.fromkeys(range(workers), 0)  # worker -> the version it holds
        self.open = {}  # worker -> the future of its push
        self.sent = []  # all pushes, any of which may come again

    def events(self):
        """Yields ('new' or 'again', worker, step, version read, future) as long as any worker has steps to go."""
        while True:
            for worker, future in list(self.open.items()):
                if future.done():
                    self.read[worker] = future.result().version
                    del self.open[worker]
            ready = [w for w, step in self.next.items() if step <= self.steps and w not in self.open]
            if not ready and not self.open:
                return
            assert ready, "every worker waits for another"
            if self.sent and self.rng.random() < 0.4:
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
        return self.shard.push(push(worker, step, gradients_of(worker, step), version))


def mean_gradient(workers, step):
    return torch.tensor([gradients_of(w, step) for w in range(workers)]).mean(0)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 6), st.randoms(use_true_random=False))
def test_sync_applies_one_update_a_step_in_any_order(workers, steps, rng):
    shard = make(Synchronous(workers, 1.0))
    expected = [torch.tensor([1.0, 2.0])]
    for step in range(1, steps + 1):
        expected.append(expected[-1] - LR * mean_gradient(workers, step))
    arrived = dict.fromkeys(range(steps + 1), 0)
    futures = []
    for kind, worker, step, _, future in Crowd(shard, workers, steps, rng).events():
        futures.append((kind, worker, step, future))
        arrived[step] += kind == "new"
        complete = sum(n == workers for n in arrived.values())
        assert shard.version == complete
        assert torch.equal(shard.pull().weights, expected[complete])
        assert future.done() == (step <= complete)
    assert shard.version == steps
    for kind, _, step, future in futures:
        answer = now(future)
        assert answer.staleness == 0
        assert answer.version == step if kind == "new" else answer.version >= step
        assert torch.equal(answer.weights, expected[answer.version])


@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_async_applies_each_push_once_in_any_order(workers, steps, rng):
    shard = make(Asynchronous(workers, 0.5))
    history, stale_seen, answers = [torch.tensor([1.0, 2.0])], [], []
    for kind, worker, step, read, future in Crowd(shard, workers, steps, rng).events():
        if kind == "new":
            stale_seen.append(len(history) - 1 - read)
            history.append(history[-1] - LR * 0.5 * torch.tensor(gradients_of(worker, step)))
        answer = now(future)
        assert answer.version == shard.version == len(history) - 1
        assert answer.staleness == (stale_seen[-1] if kind == "new" else 0)
        answers.append(answer)
    assert shard.version == workers * steps
    for answer in answers:  # none was changed by later updates
        assert torch.equal(answer.weights, history[answer.version])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", [Synchronous, Asynchronous])
def test_real_threads_that_send_everything_twice(policy, request):
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # let threads get into each other's way as often as they can
    workers, steps = 8, 40
    shard = make(policy(workers, 1 / workers), [0.0, 0.0])
    versions, errors = [], []

    def work(worker):
        try:
            version = 0
            for step in range(1, steps + 1):
                message = [push(worker, step, gradients_of(worker, step), version) for _ in range(2)]
                first, second = (shard.push(m) for m in message)
                version = first.result(timeout=30).version
                assert second.result(timeout=30).version >= version
                versions.append(version)
                shard.pull()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[worker], daemon=True) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    assert not errors
    expected = -LR * sum(mean_gradient(workers, step) for step in range(1, steps + 1))
    assert shard.pull().weights.tolist() == expected.tolist()
    updates, answers_each = (steps, workers) if policy is Synchronous else (workers * steps, 1)
    assert shard.version == updates
    assert sorted(versions) == [v for v in range(1, updates + 1) for _ in range(answers_each)]


# Cut over servers


TORCH = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1.0, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.01),
}


@settings(max_examples=30)
@pytest.mark.parametrize("optimizer", TORCH)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(9, 300), st.integers(0, 99))
def test_any_number_of_shards_gives_torchs_weights(optimizer, servers, workers, size, seed):
    numbers = torch.Generator().manual_seed(seed)
    whole = torch.randn(size, generator=numbers)
    config = RunConfig(optimizer=optimizer, momentum=0.9, weight_decay=0.01)
    ranges = [part(size, server, servers) for server in range(servers)]
    shards = [
        Shard(whole[r.start : r.stop].clone(), lambda p: make_optimizer(config, p), Synchronous(workers, 1.0))
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
            for shard, r in zip(shards, ranges, strict=True):
                shard.push(Push(worker, step, step - 1, lr, gradients[worker, r.start : r.stop].clone()))
    together = torch.cat([shard.pull().weights for shard in shards])
    torch.testing.assert_close(together, reference.detach(), rtol=1e-5, atol=1e-6)
