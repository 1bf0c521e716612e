"""Whether there is the memory for what a step and an evaluation compute, estimated from below before any is taken."""

import torch

from hvdtrain.coordination.job import Job
from hvdtrain.errors import UsageError
from hvdtrain.models.layers import Network
from hvdtrain.system.memory import free_memory
from hvdtrain.training.evaluation import EVALUATION_BATCH


def check_memory(job: Job, model: Network, side: int, validation: int) -> None:
    """UsageError where images of this side are too large for this host, or for its GPU.

    Args:
        validation: how many images this worker is tested on.
    """
    config, workers = job.config, job.world.workers
    images = -(-config.batch_size // (workers * config.accumulate))
    need = needed_bytes(model, side, images, min(EVALUATION_BATCH, validation), config.precision)
    if job.device.type == "cuda":
        together, there = 1, torch.cuda.get_device_properties(0).total_memory
        has = f"a GPU here has {there / 2**30:,.1f} GiB"
    else:
        together, there = workers if job.world.is_local else 1, free_memory()
        has = f"{there / 2**30:,.1f} GiB are free here"
    if together * need > there:
        each = f"{together} workers need" if together > 1 else "a worker needs"
        raise UsageError(
            f"images of {side} pixels are too large: {each} {together * need / 2**30:,.0f} GiB at least, and {has}; "
            "take a smaller --image-size, --batch-size or --width, or --accumulate"
        )


def needed_bytes(model: Network, side: int, images: int, tested: int, precision: str) -> int:
    """The least that a step on so many images takes, or testing so many of them.

    A step keeps each convolution's output for backward, and a test the largest one only, as a step does where the
    convolutions are frozen.
    """
    width = 2 if precision == "bf16" else 4  # bytes of a number
    outputs = model.outputs_of_convolutions(side)
    kept = sum(outputs) if any(p.requires_grad for p in model.features.parameters()) else max(outputs)
    pixels = 3 * side**2
    return max(images * (4 * pixels + width * kept), tested * (4 * pixels + width * max(outputs)))
