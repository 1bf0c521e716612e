"""Measuring a model on images it is not trained on, together: every sample once, whatever the number of workers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain.coordination.group import Group
from hvdtrain.coordination.job import Job
from hvdtrain.data.loader import Batches
from hvdtrain.data.sampling import Share
from hvdtrain.errors import Failure
from hvdtrain.numerics.precision import autocast
from hvdtrain.numerics.split import even_range
from hvdtrain.training.feed import Normalise, feed

EVALUATION_BATCH = 128


def evaluate(job: Job, model: nn.Module, group: Group, loader: Batches) -> tuple[float, float, torch.Tensor]:
    """Mean loss and accuracy over every sample once, the same on all workers; and which of its own part this worker
    answered rightly: [its samples] bool.

    Each worker that is there takes a contiguous part. If one is lost meanwhile, the others begin again.

    Raises:
        Failure: the workers together did not count every sample once.
    """
    average_buffers(model, group)
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
    """Samples in batches of EVALUATION_BATCH, in order."""
    batches = [list(own[start : start + EVALUATION_BATCH]) for start in range(0, len(own), EVALUATION_BATCH)]
    return [Share(0, 0, batch, 1.0, len(batch)) for batch in batches]


def _totals(job: Job, model: nn.Module, loader: Batches, own: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of losses, number of correct answers and of samples over `own` samples: [3] float64; and whether each was
    answered rightly: [own] bool.
    """
    totals, answers = torch.zeros(3, dtype=torch.float64), [torch.zeros(0, dtype=torch.bool)]
    normalise = Normalise(job.config, job.device)
    with torch.inference_mode():
        for _, (images, labels) in feed(loader.batches(in_batches(own)), job.device):
            with autocast(job.config.precision, job.device):
                scores = model(normalise(images)).float()
            loss = F.cross_entropy(scores, labels, reduction="sum")
            answers.append((scores.argmax(1) == labels).cpu())
            totals += torch.tensor([loss.item(), answers[-1].sum().item(), len(labels)], dtype=torch.float64)
    return totals, torch.cat(answers)


def statistics(model: nn.Module) -> list[torch.Tensor]:
    """The model's own batch-norm statistics."""
    return [b for b in model.buffers() if b.is_floating_point()]


def average_buffers(model: nn.Module, group: Group) -> None:
    """Give every worker the mean of all workers' batch-norm statistics, so that one model is measured and saved."""
    buffers = statistics(model)
    if not buffers:
        return
    *sums, workers = group.sum(torch.cat([*(b.flatten().cpu() for b in buffers), torch.ones(1)])).split(
        [*(b.numel() for b in buffers), 1]
    )
    for buffer, values in zip(buffers, sums, strict=True):
        buffer.copy_((values / workers).view_as(buffer))
