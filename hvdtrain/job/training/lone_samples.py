"""Refuses a job in which a model gets one sample alone and cannot be trained on it.

Batch norm on vectors or on 1 × 1 maps needs two values of each channel. A user's forward may call
`squeeze()`, which drops the dimension of a batch of one. Sizes of batches are known beforehand.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.models.own import why_not_trained


def check_lone_samples(
    config: RunConfig,
    worker_counts: Sequence[int],
    samples: int,
    model: nn.Module,
    sample: torch.Tensor,
) -> None:
    """Checks that no worker computes on one sample alone if the model cannot.

    Args:
        config: The job, with the global batch.
        worker_counts: The numbers of workers that it is trained with.
        samples: The number of training samples.
        model: The model on the CPU. It stays as it is.
        sample: One sample, [1, …].

    Raises:
        UsageError: The message has the batch that is too small, and one that works.
    """
    lone = [count for count in worker_counts if lone_batch(config, count, samples)]
    reason = why_not_trained(model, sample) if lone else ""
    if not reason:
        return
    batch = lone_batch(config, lone[0], samples)
    which = "each is" if batch == config.batch_size else f"the last of {samples:,} samples are"
    parts = with_noun(lone[0], "worker")
    if config.accumulate > 1:
        parts += f" in {config.accumulate} passes each"
    working = working_batch(config, worker_counts, samples)
    remedy = f"take --batch-size {working}" if working else "take fewer workers, or more samples"
    raise UsageError(
        f"--batch-size {config.batch_size} gives a worker a batch of one sample ({which} a batch of "
        f"{batch} for {parts}), on which {config.model} cannot be trained ({reason}): {remedy}"
    )


def lone_batch(config: RunConfig, workers: int, samples: int) -> int:
    """Returns the size of a global batch of which some pass has one sample; 0 if there is none.

    A share or pass without a sample computes on one that does not count. Shares are taken to be
    equal: how long those of `--shares measured` get, nobody knows beforehand.
    """
    enough = 2 * workers * config.accumulate
    sizes = [min(config.batch_size, samples)]
    total = config.total_steps(samples)
    steps_of_epoch = -(-samples // config.batch_size)
    ends_epoch = total is None or total >= steps_of_epoch
    last = samples % config.batch_size
    # Sprints leave out an epoch's short last batch.
    if last and ends_epoch and not config.sprint:
        sizes.append(last)
    return next((size for size in sizes if size < enough), 0)


def working_batch(config: RunConfig, worker_counts: Sequence[int], samples: int) -> int:
    """Returns the global batch nearest to the job's that leaves no sample alone; 0 if none does."""

    def works(batch: int) -> bool:
        other = dataclasses.replace(config, batch_size=batch)
        return not any(lone_batch(other, count, samples) for count in worker_counts)

    nearest_first = sorted(range(1, samples + 1), key=lambda size: abs(size - config.batch_size))
    return next((size for size in nearest_first if works(size)), 0)
