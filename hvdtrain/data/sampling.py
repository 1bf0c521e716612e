"""Which worker sees which sample when: pure arithmetic, the same for every mode and any number of workers.

Global batch k of an epoch is `permutation[k*G : (k+1)*G]`; each worker takes its contiguous part of it.
"""

from dataclasses import dataclass

import numpy as np


def part(total: int, worker: int, workers: int) -> range:
    """The worker's contiguous part of `total` things; parts differ by at most one in length."""
    return range(total * worker // workers, total * (worker + 1) // workers)


def permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch's samples, [samples] int64, from the seed and the epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


@dataclass(frozen=True)
class Share:
    """One worker's part of one global batch.

    Attributes:
        step: counted from 1 over the whole job.
        epoch: counted from 1.
        indices: the samples to load. Never empty: a worker left with none of a short last batch loads one
            sample with weight 0, so that it takes part in every collective with a gradient of exactly zero.
        weight: what this worker's mean loss counts, so that the plain average over workers of the weighted
            gradients is the gradient of the mean over the global batch: workers * len(part) / len(batch).
        counted: how many of the indices are this worker's own.
    """

    step: int
    epoch: int
    indices: list[int]
    weight: float
    counted: int


@dataclass(frozen=True)
class Plan:
    """The order of training for one worker."""

    samples: int
    batch_size: int
    seed: int
    worker: int
    workers: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

    def epoch(self, epoch: int) -> list[Share]:
        """This worker's shares of one epoch (from 1), in order."""
        order = permutation(self.samples, self.seed, epoch)
        shares = []
        for k in range(self.steps_per_epoch):
            batch = order[k * self.batch_size : (k + 1) * self.batch_size]
            own = part(len(batch), self.worker, self.workers)
            indices = batch[own.start : own.stop].tolist()
            shares.append(
                Share(
                    step=(epoch - 1) * self.steps_per_epoch + k + 1,
                    epoch=epoch,
                    indices=indices or [int(batch[0])],
                    weight=self.workers * len(own) / len(batch),
                    counted=len(own),
                )
            )
        return shares
