"""Sampling: which worker trains on which samples at which step.

This is pure arithmetic, the same for every mode and any number of workers. Global batch k of an
epoch is `permutation[k*G : (k+1)*G]`. It is cut into as many contiguous shares as there are
workers. In lockstep worker w takes share w of every batch; leased shares go to workers as they
become ready.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hvdtrain.base.numerics.split import even_range, proportional_range, steps_before_round

SPREAD = 8  # blocks over which the samples of one block are mixed


@lru_cache(maxsize=2)
def permutation(samples: int, seed: int, epoch: int, block: int = 0) -> np.ndarray:
    """Returns the order of an epoch's samples, which depends on the seed and the epoch alone.

    Args:
        samples: The number of samples.
        seed: The seed of the job.
        epoch: The epoch, from 1.
        block: 0, or a number of samples that stay close together in every epoch: those of a block
            of `packing_order`. The order of blocks is random, and the samples of a block are mixed
            with those of SPREAD blocks, as MosaicML Streaming's py1e does.

    Returns:
        Indices of samples, [samples] int64, in an array that cannot be changed.
    """
    rng = np.random.default_rng([seed, epoch])
    block = min(block, samples)
    if block:
        places = np.repeat(rng.permutation(-(-samples // block)), block)[:samples]
        mixed_places = places + rng.uniform(0, SPREAD, samples)
        order = packing_order(samples)[np.argsort(mixed_places, kind="stable")]
    else:
        order = rng.permutation(samples)
    order.flags.writeable = False
    return order


def packing_order(samples: int) -> np.ndarray:
    """Returns the order in which training images are packed, [samples] int64.

    It is random, and the same in all runs.
    """
    return np.random.default_rng(0).permutation(samples)


@dataclass(frozen=True)
class Share:
    """A worker's part of one global batch.

    Attributes:
        step: The step of the global batch, from 1 over the whole job.
        epoch: The epoch, from 1.
        indices: The samples to load. Never empty: where a short last batch has no sample for a
            share, the share loads one sample with weight 0. So its worker takes part in every
            collective, with a gradient of exactly zero.
        weight: The factor of the share's mean loss, workers * len(share) / len(batch). With it the
            plain average of the shares' gradients is the gradient of the global batch's mean loss.
        counted: The number of samples that count: 0 of a share that loads one with weight 0.
        slot: The index of the share in its batch, from 0.
    """

    step: int
    epoch: int
    indices: list[int]
    weight: float
    counted: int
    slot: int = 0


@dataclass(frozen=True)
class BatchSampler:
    """The order of training for one worker.

    Attributes:
        samples: The number of training samples.
        batch_size: The global batch.
        seed: The seed of the job.
        worker: The rank of this worker.
        workers: The number of workers.
        block: See permutation.
    """

    samples: int
    batch_size: int
    seed: int
    worker: int
    workers: int
    block: int = 0

    def of_whole_batches(self) -> "BatchSampler":
        """Returns a sampler without an epoch's last batch, where that is shorter than the others.

        An epoch that has only this batch keeps it.
        """
        whole = self.samples - self.samples % self.batch_size
        return dataclasses.replace(self, samples=whole or self.samples)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

    def trained(self, step: int) -> int:
        """Returns how many samples all global batches up to this step have together."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.samples + steps * self.batch_size

    def round_of(self, step: int, every: int) -> int:
        """Returns the round that comes after so many steps, from 0 over the whole job.

        A round has `every` steps. The last round of an epoch may have fewer.
        """
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * -(-self.steps_per_epoch // every) + steps // every

    def steps_before(self, number: int, every: int) -> int:
        """Returns how many steps precede a round."""
        return steps_before_round(number, self.steps_per_epoch, every)

    def steps_of_round(self, number: int, every: int, until: int | None) -> range:
        """Returns the steps of a round, from 0, without steps from `until` on.

        Args:
            number: The round, from 0.
            every: Steps of a round.
            until: The number of steps of the job; None where it has no limit.
        """
        first = self.steps_before(number, every)
        last = self.steps_before(number + 1, every)
        return range(first, last if until is None else min(last, until))

    def epoch(self, epoch: int, done: int = 0) -> Iterator[Share]:
        """Yields this worker's equal shares of one epoch, in order.

        Args:
            epoch: The epoch, from 1.
            done: Steps of the epoch that are skipped.
        """
        first = (epoch - 1) * self.steps_per_epoch
        return self._equal_shares(first + done, first + self.steps_per_epoch)

    def _equal_shares(self, after: int, until: int) -> Iterator[Share]:
        """Yields this worker's equal shares of the steps from `after` + 1 to `until`."""
        return (self.share(step * self.workers + self.worker) for step in range(after, until))

    def needed(self, after: int, until: int | None) -> Sequence[int]:
        """Returns the samples that this worker needs in the steps from `after` + 1 to `until`.

        These are all samples where the steps are more than an epoch's, or where `until` is None.
        """
        if until is None or until - after > self.steps_per_epoch:
            return range(self.samples)
        indices: list[int] = []
        for share in self._equal_shares(after, until):
            indices += share.indices
        return indices

    def share(self, number: int, speeds: Sequence[float] = ()) -> Share:
        """Returns a share by its number over the whole job, (step - 1) * workers + slot.

        Args:
            number: The number, from 0.
            speeds: The speed of each slot's worker: shares are in proportion to these. Without
                speeds shares are equal.
        """
        batch_number, slot = divmod(number, self.workers)
        epoch, k = divmod(batch_number, self.steps_per_epoch)
        order = permutation(self.samples, self.seed, epoch + 1, self.block)
        batch = order[k * self.batch_size : (k + 1) * self.batch_size]
        if speeds:
            places = proportional_range(len(batch), slot, speeds)
        else:
            places = even_range(len(batch), slot, self.workers)
        return Share(
            step=batch_number + 1,
            epoch=epoch + 1,
            indices=batch[places.start : places.stop].tolist() or [int(batch[0])],
            weight=self.workers * len(places) / len(batch),
            counted=len(places),
            slot=slot,
        )
