"""Which samples a worker of a script has."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from hvdtrain.base.numerics.split import even_range


class WorkerSampler(Sampler[int]):
    """This worker's samples of each epoch, in an order that depends on the seed and the epoch.

    All workers have equally many: the last samples of an order are left out where they cannot be
    shared evenly. Worker r of n has samples r, r + n, … of the order, so that the batches of all
    workers together are those that one process would have.

    Args:
        dataset: has a length.
        worker: this worker's number.
        workers: the number of workers.
        seed: decides the order.
        shuffle: False: the data set's own order.

    Attributes:
        epoch: the epoch, from 0. Each pass through the sampler ends with the next one.
        taken: how many samples were handed out.
    """

    def __init__(
        self, dataset: Sized, worker: int, workers: int, seed: int, shuffle: bool = True
    ) -> None:
        self.samples = len(dataset)
        self.worker = worker
        self.workers = workers
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.taken = 0

    def __len__(self) -> int:
        return self.samples // self.workers

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + 10**6 * self.epoch)
            order = torch.randperm(self.samples, generator=generator)
        for place in range(len(self)):
            self.taken += 1
            yield int(order[place * self.workers + self.worker])
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Goes on with this epoch, as torch's DistributedSampler does."""
        self.epoch = epoch


def part_of(samples: int, worker: int, workers: int) -> range:
    """Returns a worker's contiguous part of so many samples, to evaluate on each of them once."""
    return even_range(samples, worker, workers)
