"""Shares of a batch by how fast workers compute."""

import torch

from hvdtrain.data.sampling import BatchSampler
from hvdtrain.training.barrier import GO_ON
from hvdtrain.training.shares import MeasuredShares


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
    assert lengths == [[10, 10]] * 5 + [[16, 4]] * 5  # the barrier after step 2 counts from step 6 on
