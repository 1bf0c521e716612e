"""Evaluation by all workers together, with every sample once, whatever the number of workers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.precision import autocast
from hvdtrain.base.numerics.split import even_range
from hvdtrain.data.loader import Batches
from hvdtrain.data.sampling import Share
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import Synchroniser
from hvdtrain.job.training.feed import Normalise, feed

EVALUATION_BATCH = 128


def evaluate(
    job: Job, model: nn.Module, sync: Synchroniser, loader: Batches
) -> tuple[float, float, torch.Tensor]:
    """Evaluates the model on every sample once. All workers call this together.

    Each worker takes a contiguous part. If a worker is lost meanwhile, the others begin again.

    Args:
        job: the job.
        model: the model.
        sync: connects this worker to the others.
        loader: the images.

    Returns:
        The mean loss and the accuracy, the same on all workers. And for each sample of this
        worker's part whether the model classified it correctly: [samples of the part] bool.

    Raises:
        Failure: the workers together did not count every sample once.
    """
    group = sync.group
    average_buffers(model, sync)
    model.eval()
    there: list[int] = []
    counted, rows = group.all_gather([])
    while counted != there:
        there = counted
        own = even_range(len(loader.samples), there.index(group.worker), len(there))
        totals, answers = _totals(job, model, loader, own)
        counted, rows = group.all_gather(totals.tolist())
    model.train()
    loss, correct, samples = rows.sum(0).tolist()
    if samples != len(loader.samples):
        raise Failure(f"evaluation counted {samples:.0f} of {len(loader.samples)} samples")
    return loss / samples, correct / samples, answers


def in_batches(own: Sequence[int]) -> list[Share]:
    """Returns the samples in batches of EVALUATION_BATCH, in order."""
    batches = [
        list(own[start : start + EVALUATION_BATCH])
        for start in range(0, len(own), EVALUATION_BATCH)
    ]
    return [Share(0, 0, batch, 1.0, len(batch)) for batch in batches]


def _totals(
    job: Job, model: nn.Module, loader: Batches, own: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Evaluates the model on this worker's part.

    Args:
        job: the job.
        model: the model.
        loader: the images.
        own: this worker's part of the samples.

    Returns:
        The sum of losses, the number of correct answers, and the number of samples: [3] float64.
        And for each sample whether the model classified it correctly: [own] bool.
    """
    totals = torch.zeros(3, dtype=torch.float64)
    answers = [torch.zeros(0, dtype=torch.bool)]
    normalise = Normalise(job.config, job.device)
    with torch.inference_mode():
        for _, (images, labels) in feed(loader.batches(in_batches(own)), job.device):
            with autocast(job.config.precision, job.device):
                scores = model(normalise(images)).float()
            loss = F.cross_entropy(scores, labels, reduction="sum")
            is_correct = (scores.argmax(1) == labels).cpu()
            answers.append(is_correct)
            counts = [loss.item(), is_correct.sum().item(), len(labels)]
            totals += torch.tensor(counts, dtype=torch.float64)
    return totals, torch.cat(answers)


def statistics(model: nn.Module) -> list[torch.Tensor]:
    """Returns the model's batch-norm statistics: the buffers that hold floats."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def average_buffers(model: nn.Module, sync: Synchroniser) -> None:
    """Gives every worker the mean of all workers' batch-norm statistics.

    So all workers evaluate and save the same model. All workers call this together.
    """
    buffers = statistics(model)
    if not buffers:
        return
    # With an empty float32 tensor, the concatenation has float32 at least.
    own = torch.cat([torch.empty(0), *(buffer.flatten().cpu() for buffer in buffers)])
    if sync.group.workers > 1:
        sync.group.statistics_bytes += own.nbytes
    means = sync.mean_over_workers(own).split([buffer.numel() for buffer in buffers])
    for buffer, values in zip(buffers, means, strict=True):
        buffer.copy_(values.view_as(buffer))
