"""Which worker sees which sample when: whatever the number of workers, they train on the same
global batches.
"""

from itertools import chain, count, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data.sampling import SPREAD, BatchSampler, Share, packing_order, permutation
from hvdtrain.job.training.step import digest

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def jobs(draw):
    """(plans of all workers, epoch, the plan of one worker alone) of a job that may be run."""
    workers = draw(st.integers(1, 8))
    samples = draw(st.integers(1, 60 * workers))
    batch = workers * draw(st.integers(1, 12))
    seed, epoch = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 50))
    block = draw(st.sampled_from([0, 1, 7, 100, 10_000]))
    plans = [
        BatchSampler(samples, batch, seed, worker, workers, block) for worker in range(workers)
    ]
    return plans, epoch, BatchSampler(samples, batch, seed, 0, 1, block)


def counted(share):
    return share.indices[: share.counted]


def check_epoch(plans, epoch, alone):
    """Everything that is promised of one epoch."""
    shares = [list(plan.epoch(epoch)) for plan in plans]
    whole = list(alone.epoch(epoch))
    workers = len(plans)
    assert {len(s) for s in shares} == {len(whole)} == {alone.steps_per_epoch}
    assert sorted(i for share in whole for i in share.indices) == list(range(alone.samples))
    for k, batch in enumerate(whole):
        parts = [s[k] for s in shares]
        assert batch.weight == 1 and batch.counted == len(batch.indices)
        assert {(p.step, p.epoch) for p in parts} == {(batch.step, batch.epoch)}
        assert batch.step == (epoch - 1) * len(whole) + k + 1
        assert [i for p in parts for i in counted(p)] == batch.indices
        assert sum(p.weight for p in parts) == pytest.approx(workers)
        assert max(p.counted for p in parts) - min(p.counted for p in parts) <= 1
        for p in parts:
            assert (p.weight == 0) == (p.counted == 0)
            assert len(p.indices) == max(1, p.counted)
            assert set(p.indices) <= set(batch.indices)
        if k < len(whole) - 1 or alone.samples % alone.batch_size == 0:
            assert {p.counted for p in parts} == {alone.batch_size // workers}
            assert {p.weight for p in parts} == {1.0}


@given(jobs())
def test_the_workers_parts_are_the_global_batch_in_order_and_each_sample_comes_once_an_epoch(job):
    check_epoch(*job)


def test_so_many_samples_are_in_all_batches_up_to_a_step():
    sampler = BatchSampler(10, 4, 0, 0, 2)  # batches of 4, 4 and 2
    assert [sampler.trained(step) for step in range(8)] == [0, 4, 8, 10, 14, 18, 20, 24]


def test_of_an_epoch_of_whole_batches_each_has_as_many_samples():
    sampler = BatchSampler(66, 32, 0, 1, 2).of_whole_batches()
    assert [len(share.indices) for share in sampler.epoch(1)] == [16, 16]
    assert BatchSampler(10, 32, 0, 0, 1).of_whole_batches().steps_per_epoch == 1


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    first = permutation(1000, 1, 1)
    np.random.seed(9)
    torch.manual_seed(9)
    assert (permutation(1000, 1, 1) == first).all()
    for other in (permutation(1000, 2, 1), permutation(1000, 1, 2)):
        assert (other != first).mean() > 0.9
    # (seed 1, epoch 2) and (seed 2, epoch 1) must not be the same shuffle, as they are where the
    # two are added.
    assert (permutation(1000, 2, 1) != permutation(1000, 1, 2)).mean() > 0.9


def test_in_blocks_few_row_groups_are_read_at_a_time():
    samples, block = 20_050, 200
    group = np.empty(samples, int)  # of each sample
    group[packing_order(samples)] = np.arange(samples) // block
    orders = [permutation(samples, seed, epoch, block) for seed, epoch in ((0, 1), (0, 2), (1, 1))]
    for order in orders:
        read = group[order]
        assert len(set(read[:32].tolist())) <= 3  # at first
        assert (
            max(len(set(read[k : k + block].tolist())) for k in range(0, samples, block))
            <= SPREAD + 3
        )
        first = np.sort(
            [np.flatnonzero(read == number)[0] for number in range(samples // block + 1)]
        )
        # a new one every now and then, and never many at once
        assert np.diff(first).max() < 4 * block
        # What comes near each other is mixed: of the neighbours in a group few are in the order.
        assert (np.diff(np.argsort(order)[packing_order(samples)]) == 1).mean() < 0.02
    assert (orders[0] != orders[1]).mean() > 0.9 and (orders[0] != orders[2]).mean() > 0.9
    assert sorted(permutation(30, 0, 1, 2**31 - 1)) == list(range(30))  # all in one block


def weighted_mean(plans, epoch, gradients):
    """What workers average: [steps, parameters], each worker's mean gradient times its weight."""
    steps = zip(*[plan.epoch(epoch) for plan in plans], strict=True)
    return np.array(
        [
            np.mean([s.weight * gradients[s.indices].mean(0) for s in shares], axis=0)
            for shares in steps
        ]
    )


@given(jobs(), st.integers(0, 99))
def test_the_average_of_weighted_gradients_is_the_mean_over_the_global_batch(job, seed):
    plans, epoch, alone = job
    gradients = np.random.default_rng(seed).normal(size=(alone.samples, 3))
    expected = np.array([gradients[share.indices].mean(0) for share in alone.epoch(epoch)])
    np.testing.assert_allclose(weighted_mean(plans, epoch, gradients), expected, atol=1e-12)


def test_an_epoch_of_imagenet_is_planned_in_no_time():
    samples, batch, workers = 1_281_167, 4_096, 8
    sampler = BatchSampler(samples, batch, 0, workers - 1, workers)
    shares = list(sampler.epoch(1))
    assert len(shares) == 313
    assert sum(s.counted for s in shares) == 160_146
    assert list(sampler.epoch(1, 300)) == shares[300:]


# The digest: were the samples the same?


def job_digest(plans, epoch):
    return sum(digest(share) for plan in plans for share in plan.epoch(epoch)) % 2**48


@given(jobs())
def test_the_digest_adds_up_over_the_workers(job):
    plans, epoch, alone = job
    assert job_digest(plans, epoch) == job_digest([alone], epoch)


@given(st.lists(st.integers(0, 2**31), min_size=1, unique=True), st.integers(1, 2**31), st.data())
def test_the_digest_changes_when_one_sample_changes(indices, step, data):
    before = Share(step, 1, indices, 1.0, len(indices))
    place = data.draw(st.integers(0, len(indices) - 1))
    other = data.draw(st.integers(0, 2**31).filter(lambda i: i != indices[place]))
    after = Share(step, 1, [*indices[:place], other, *indices[place + 1 :]], 1.0, len(indices))
    assert digest(before) != digest(after)
    assert digest(before) != digest(Share(step + 1, 1, indices, 1.0, len(indices)))


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_digest_changes_when_two_samples_change_places(step, other_step, a, b):
    """A linear hash would not see it: the sums of steps and of samples stay the same."""
    if step == other_step or a == b:
        return

    def of(step, index):
        return digest(Share(step, 1, [index], 1.0, 1))

    assert (of(step, a) + of(other_step, b)) % 2**48 != (of(step, b) + of(other_step, a)) % 2**48


def test_a_sample_loaded_with_weight_0_is_not_in_the_digest():
    assert digest(Share(1, 1, [5], 0.0, 0)) == 0


@given(jobs(), st.integers(0, 40), st.integers(1, 60))
def test_what_a_worker_decodes_at_once_is_what_it_trains_on(job, after, more):
    plans, _, alone = job
    for plan in plans:
        steps = chain.from_iterable(plan.epoch(epoch) for epoch in count(1))
        trained = {index for share in islice(steps, after, after + more) for index in share.indices}
        needed = set(plan.needed(after, after + more))
        assert (
            needed == trained
            if more <= alone.steps_per_epoch
            else needed == set(range(plan.samples))
        )
        assert set(plan.needed(after, None)) == set(range(plan.samples))


@given(st.integers(1, 300), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_by_speed_are_the_batch_in_order_in_proportion_and_none_is_empty(batch, speeds):
    workers = len(speeds)
    shares = [
        BatchSampler(batch, batch, 3, worker, workers).share(worker, speeds)
        for worker in range(workers)
    ]
    assert [index for share in shares for index in counted(share)] == BatchSampler(
        batch, batch, 3, 0, 1
    ).share(0).indices
    assert sum(share.weight for share in shares) == pytest.approx(workers)
    assert all(share.counted for share in shares) or batch < workers
    for share, speed in zip(shares, speeds, strict=True):
        assert (
            abs(share.counted - batch * speed / sum(speeds)) <= 2
            or share.counted == 1
            or workers > 2
        )
