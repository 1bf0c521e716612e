"""Buckets under any order of pushes, some of which come again: what each policy promises all the
same.
"""

import sys
import threading
from functools import partial

import pytest
import torch
from helpers.buckets import LR, READER, asynchronous, make, make_server, push, softsync, stale, sync
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.job.wire.messages import FreshWeights, Push
from hvdtrain.job.wire.requests import as_future

pytestmark = pytest.mark.usefixtures("one_thread")

# Each worker pushes a step when it has the answer to the one before, while old pushes come again


def gradients_of(worker, step):
    return [float((3 * worker + 5 * step) % 7 - 3), float((worker * step) % 5)]


class Crowd:
    """Workers whose messages arrive in an order that `rng` chooses, some of them more than once.

    Attributes:
        open: the workers that wait for an answer, each with the step that it has pushed.
    """

    def __init__(self, bucket, workers, steps, rng):
        self.bucket, self.steps, self.rng = bucket, steps, rng
        self.next = dict.fromkeys(range(workers), 1)  # worker -> its next step
        self.read = dict.fromkeys(range(workers), 0)  # worker -> the version it holds
        self.open = {}
        self.answers = []  # (step, answer) as each worker got it
        self.sent = []  # all pushes, any of which may come again

    def events(self):
        """Yields ('new' or 'again', worker, step, version read, replies) while any worker has steps
        to go.
        """
        while self.open or any(step <= self.steps for step in self.next.values()):
            ready = [
                w for w, step in self.next.items() if step <= self.steps and w not in self.open
            ]
            assert ready, "every worker waits for another"
            if self.sent and self.rng.random() < 0.4:  # a duplicate
                worker, step, version = self.rng.choice(self.sent)
                replies = self._push(worker, step, version)
                assert replies == []
                yield "again", worker, step, version, replies
                continue
            worker = self.rng.choice(ready)
            step, version = self.next[worker], self.read[worker]
            self.open[worker] = step
            self.sent.append((worker, step, version))
            self.next[worker] += 1
            replies = self._push(worker, step, version)
            self.take(replies)
            yield "new", worker, step, version, replies

    def take(self, replies):
        for worker, answer in replies:
            self.answers.append(
                (self.open.pop(worker), answer._replace(weights=answer.weights.clone()))
            )
            self.read[worker] = answer.version

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
    for kind, _, step, _, replies in crowd.events():
        arrived[step] += kind == "new"
        complete = sum(n == workers for n in arrived.values())
        assert bucket.version == complete
        assert torch.equal(bucket.pull(READER).weights, expected[complete])
        if kind == "new":
            assert bool(replies) == (step <= complete)
    assert bucket.version == steps
    assert len(crowd.answers) == workers * steps
    for step, answer in crowd.answers:
        assert (answer.staleness, answer.version) == (0, step)
        assert torch.equal(answer.weights, expected[answer.version])


@given(
    st.sampled_from([(1, 0), (2, 1), (3, 1), (4, 2)]),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_with_backup_workers_every_step_is_the_mean_of_the_first_to_come_in_any_order(
    sizes, steps, rng
):
    """Replayed in the ledger's order, the same pushes give the same bits."""
    workers, backup = sizes
    needed, lines = workers - backup, []
    bucket = make(sync(workers, backup=backup), [0.5, 0.25], ledger=lines.append)
    crowd = Crowd(bucket, workers, steps, rng)
    for _ in crowd.events():
        pass
    assert bucket.version == steps
    for step in range(1, steps + 1):
        made = [line for line in lines if line.version == step]
        assert len(made) == needed and {line.step for line in made} == {step}
    # nothing is forgotten: the others are lines of dropped pushes
    assert len(lines) == workers * steps
    again = make(sync(workers, backup=backup), [0.5, 0.25])
    for line in lines:
        replies = again.push(
            push(line.worker, line.step, gradients_of(line.worker, line.step), line.version_read)
        )
        assert any(answer.dropped for _, answer in replies) == (line.version is None)
    assert torch.equal(again.pull(READER).weights, bucket.pull(READER).weights)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 6), st.randoms(use_true_random=False))
def test_async_applies_each_push_once_in_any_order(workers, steps, rng):
    bucket = make(asynchronous(workers, 1 / workers))
    history = [torch.tensor([1.0, 2.0])]
    crowd = Crowd(bucket, workers, steps, rng)
    for kind, worker, step, read, replies in crowd.events():
        if kind == "new":
            [(to, answer)] = replies
            assert to == worker
            assert answer.staleness == len(history) - 1 - read
            history.append(history[-1] - LR / workers * torch.tensor(gradients_of(worker, step)))
            assert answer.version == len(history) - 1
        assert bucket.version == len(history) - 1
    assert bucket.version == workers * steps
    assert len(crowd.answers) == workers * steps
    for _, answer in crowd.answers:
        assert torch.equal(answer.weights, history[answer.version])


@given(st.integers(2, 4), st.integers(0, 3), st.integers(1, 8), st.randoms(use_true_random=False))
def test_ssp_holds_back_who_is_more_than_s_ahead_of_the_slowest_and_goes_on_without_who_is_lost(
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
            gone = pushed.pop(lost)
            del crowd.next[lost]
            crowd.open.pop(lost, None)
            crowd.sent = [sent for sent in crowd.sent if sent[0] != lost]
            crowd.take(bucket.lose(lost))
            with pytest.raises(Failure, match="silent for so long"):
                bucket.push(push(lost, gone + 1, [0.0, 0.0]))
        slowest = min(pushed.values())
        for own, clock in pushed.items():
            assert (own in crowd.open) == (clock - slowest > staleness)
        # Who goes on computes step + 1: never more than s + 1 pushes beyond the slowest's.
        assert max(pushed.values()) - slowest <= staleness + 1
    assert set(pushed.values()) == {steps}
    assert bucket.version == steps * (workers - 1) + gone


@given(
    st.sampled_from(["sgd", "adam", "adamw"]),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_ssp_without_slack_is_bulk_synchronous_for_every_optimizer_where_n_pushes_make_a_step(
    optimizer, workers, steps, rng
):
    config = RunConfig(optimizer=optimizer, weight_decay=0.01)
    reference, bucket = (
        make(sync(workers), config=config),
        make(softsync(workers, 0), config=config),
    )
    expected = [torch.tensor([1.0, 2.0])]
    for step in range(1, steps + 1):
        for worker in range(workers):
            reference.push(push(worker, step, gradients_of(worker, step), step - 1))
        expected.append(reference.pull(READER).weights)
    crowd = Crowd(bucket, workers, steps, rng)
    for _ in crowd.events():
        pass
    for step, answer in crowd.answers:
        torch.testing.assert_close(answer.weights, expected[step])


@given(st.sampled_from([1, 2, 4]), st.integers(1, 6), st.randoms(use_true_random=False))
def test_softsync_counts_each_push_once_in_any_order_and_lets_its_worker_go_on(workers, steps, rng):
    bucket = make(softsync(workers))
    crowd = Crowd(bucket, workers, steps, rng)
    pushes, total = 0, torch.tensor([1.0, 2.0])
    for kind, worker, step, read, replies in crowd.events():
        if kind == "new":
            pushes += 1
            total -= LR / workers * torch.tensor(gradients_of(worker, step))
            [(to, answer)] = replies
            assert to == worker
            assert answer.version == pushes // workers
            assert answer.staleness == (pushes - 1) // workers - read
        assert bucket.version == pushes // workers
        if pushes % workers == 0:
            assert torch.equal(bucket.pull(READER).weights, total)
    assert bucket.version == steps


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", [sync, asynchronous])
def test_real_threads_that_send_everything_twice(policy, request):
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # let threads get into each other's way as often as they can
    workers, steps = 8, 40
    server = make_server(lambda: policy(workers, 1 / workers), workers)
    server.install(0, torch.zeros(2))
    versions, errors = [], []

    def work(worker):
        try:
            version = 0
            for step in range(1, steps + 1):
                sent = Push(worker, step, version, LR, [torch.tensor(gradients_of(worker, step))])
                answer, again = (server.push(0, sent) for _ in range(2))
                version = as_future(answer).wait().version
                assert not isinstance(again, FreshWeights) or again.version == version
                versions.append(version)
                server.calls["pull"](0, READER)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=[worker], daemon=True) for worker in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    assert not errors
    expected = -LR * sum(mean_gradient(workers, step) for step in range(1, steps + 1))
    assert server.calls["pull"](0, READER).weights.tolist() == expected.tolist()
    updates, answers_each = (steps, workers) if policy is sync else (workers * steps, 1)
    assert server.buckets[0].weights.version == updates
    assert sorted(versions) == [v for v in range(1, updates + 1) for _ in range(answers_each)]
