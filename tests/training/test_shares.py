"""Shares of a batch by how fast workers compute."""

import itertools

import torch

from hvdtrain.data.sampling import BatchSampler
from hvdtrain.job.training.barrier import GO_ON
from hvdtrain.job.training.shares import MeasuredShares, Shares


class Barrier:
    """Where workers meet after each second step, and are told what each has computed."""

    def __init__(self, computed):
        self.gathered, self.computed = None, computed

    def after(self, step, elapsed, is_last, more):
        if step % 2 == 0:
            self.gathered = step, self.computed.clone()
        return GO_ON


def test_a_fast_worker_has_more_of_each_batch_from_the_agreed_step_on():
    shares = [MeasuredShares(BatchSampler(200, 20, 0, worker, 2), lag=3) for worker in (0, 1)]
    computed = torch.zeros(2, 2, dtype=torch.float64)
    barriers, lengths = [Barrier(computed), Barrier(computed)], []
    for step, pair in enumerate(zip(*[of.after(0) for of in shares], strict=True), start=1):
        lengths.append([share.counted for share in pair])
        for worker, speed in enumerate((100.0, 25.0)):
            taken = pair[worker].counted
            shares[worker].took(taken, taken / speed)
            computed[worker] = shares[worker].computed
        for of, barrier in zip(shares, barriers, strict=True):
            of.after_step(barrier, step, 0.0)
    # the barrier after step 2 counts from step 6 on
    assert lengths == [[10, 10]] * 5 + [[16, 4]] * 5


def test_workers_that_are_left_share_the_same_global_batches_from_the_next_step_on():
    whole = [share.indices for share in Shares(BatchSampler(200, 20, 0, 0, 1)).after(0)]
    for kind in (Shares, lambda sampler: MeasuredShares(sampler, lag=3)):
        shares = [kind(BatchSampler(200, 20, 0, worker, 3)) for worker in range(3)]
        first = zip(*[itertools.islice(of.after(0), 4) for of in shares], strict=True)
        batches = [[*one.indices, *two.indices, *three.indices] for one, two, three in first]
        for place, of in enumerate((shares[0], shares[2])):
            of.recut(place, 2)
        rest = zip(shares[0].after(4), shares[2].after(4), strict=True)
        batches += [[*one.indices, *other.indices] for one, other in rest]
        assert batches == whole


def test_what_was_measured_with_a_worker_that_is_lost_meanwhile_cuts_nothing():
    shares = MeasuredShares(BatchSampler(200, 20, 0, 0, 3), lag=3)
    shares.recut(0, 2)
    shares.after_step(Barrier(torch.ones(3, 2, dtype=torch.float64)), 2, 0.0)
    assert [share.counted for share in shares.after(0)] == [10] * 10
