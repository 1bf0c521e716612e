"""Which samples are trained on at which step: pure arithmetic, the same for every mode and any number of workers.

Global batch k of an epoch is `permutation[k*G : (k+1)*G]`; it is cut into as many contiguous shares as there are
workers. In lockstep worker w takes share w of every batch; leased shares go to whoever is ready.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hvdtrain.numerics.split import even_range, proportional_range

SPREAD = 8  # over so many blocks the samples of one are mixed


@lru_cache(maxsize=2)
def permutation(samples: int, seed: int, epoch: int, block: int = 0) -> np.ndarray:
    """The order of an epoch's samples, [samples] int64, from the seed and the epoch alone. Not to be changed.

    Args:
        block: 0, or so many samples come near each other, in every epoch the same ones: those of a block of
            `packing_order`. Blocks come in any order, and each sample somewhere among those of SPREAD blocks. This is
            how MosaicML Streaming's py1e mixes samples.
    """
    draw = np.random.default_rng([seed, epoch])
    if block := min(block, samples):
        places = np.repeat(draw.permutation(-(-samples // block)), block)[:samples]
        order = packing_order(samples)[np.argsort(places + draw.uniform(0, SPREAD, samples), kind="stable")]
    else:
        order = draw.permutation(samples)
    order.flags.writeable = False
    return order


def packing_order(samples: int) -> np.ndarray:
    """The order, [samples] int64, in which training images are packed: mixed, and the same in all runs."""
    return np.random.default_rng(0).permutation(samples)


@dataclass(frozen=True)
class Share:
    """A worker's part of one global batch.

    Attributes:
        step: of the global batch, counted from 1 over the whole job.
        epoch: counted from 1.
        indices: the samples to load. Never empty: a share of a short last batch that has none loads one sample with
            weight 0, so that its worker takes part in every collective with a gradient of exactly zero.
        weight: what the mean loss of the share counts, so that the plain average over shares of the weighted
            gradients is the gradient of the mean over the global batch: workers * len(share) / len(batch).
        counted: how many of the indices count: none of a share that is empty but for that sample.
        slot: which share of the batch it is, from 0.
    """

    step: int
    epoch: int
    indices: list[int]
    weight: float
    counted: int
    slot: int = 0


@dataclass(frozen=True)
class BatchSampler:
    """The order of training for one worker; block: see permutation."""

    samples: int
    batch_size: int
    seed: int
    worker: int
    workers: int
    block: int = 0

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

    def trained(self, step: int) -> int:
        """How many samples all global batches up to this step have together."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.samples + steps * self.batch_size

    def round_of(self, step: int, every: int) -> int:
        """Which round, from 0 over the whole job, comes after so many steps. A round has `every` steps; the last of an
        epoch may have fewer.
        """
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * -(-self.steps_per_epoch // every) + steps // every

    def steps_before(self, number: int, every: int) -> int:
        """How many steps are over when this round begins."""
        epochs, rounds = divmod(number, -(-self.steps_per_epoch // every))
        return epochs * self.steps_per_epoch + rounds * every

    def steps_of_round(self, number: int, every: int, until: int | None) -> range:
        """Steps of a round, each by how many come before it; none beyond so many, if there is a limit."""
        first, last = (self.steps_before(n, every) for n in (number, number + 1))
        return range(first, last if until is None else min(last, until))

    def epoch(self, epoch: int, done: int = 0) -> Iterator[Share]:
        """This worker's shares of one epoch (from 1), in order, of equal length; without those of the first
        `done` steps. Each is made when it is asked for: an epoch of a million samples has many.
        """
        first = (epoch - 1) * self.steps_per_epoch
        return self._equal_shares(first + done, first + self.steps_per_epoch)

    def _equal_shares(self, after: int, until: int) -> Iterator[Share]:
        """This worker's equal shares of the steps after that up to `until`."""
        return (self.share(step * self.workers + self.worker) for step in range(after, until))

    def needed(self, after: int, until: int | None) -> Sequence[int]:
        """The samples of this worker's shares of the steps after that up to `until`, where those are no more than an
        epoch's; else, and where nobody knows how many there will be (None), all.
        """
        if until is None or until - after > self.steps_per_epoch:
            return range(self.samples)
        return [index for share in self._equal_shares(after, until) for index in share.indices]

    def share(self, number: int, speeds: Sequence[float] = ()) -> Share:
        """A share by its number, from 0 over the whole job: number = (step - 1) * workers + slot.

        Args:
            speeds: of each slot's worker: shares are in proportion to them. Else they are equal.
        """
        batch_number, slot = divmod(number, self.workers)
        epoch, k = divmod(batch_number, self.steps_per_epoch)
        order = permutation(self.samples, self.seed, epoch + 1, self.block)
        batch = order[k * self.batch_size : (k + 1) * self.batch_size]
        places = proportional_range(len(batch), slot, speeds) if speeds else even_range(len(batch), slot, self.workers)
        return Share(
            step=batch_number + 1,
            epoch=epoch + 1,
            indices=batch[places.start : places.stop].tolist() or [int(batch[0])],
            weight=self.workers * len(places) / len(batch),
            counted=len(places),
            slot=slot,
        )
