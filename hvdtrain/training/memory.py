"""Whether there is the memory for what a step and an evaluation compute, estimated from below before any is taken."""

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hvdtrain.coordination.job import Job
from hvdtrain.errors import UsageError
from hvdtrain.system.memory import free_memory
from hvdtrain.training.evaluation import EVALUATION_BATCH


def check_memory(job: Job, model: nn.Module, sample: torch.Tensor, validation: int) -> None:
    """UsageError where images of this size are too large for this host, or for its GPU.

    Args:
        sample: one, [1, …, side], as for needed_bytes.
        validation: how many images this worker is tested on.
    """
    config, workers = job.config, job.world.workers
    images = -(-config.batch_size // (workers * config.accumulate))
    need = needed_bytes(model, sample, images, min(EVALUATION_BATCH, validation), config.precision)
    if job.device.type == "cuda":
        together, there = 1, torch.cuda.get_device_properties(0).total_memory
        has = f"a GPU here has {there / 2**30:,.1f} GiB"
    else:
        together, there = workers if job.world.is_local else 1, free_memory()
        has = f"{there / 2**30:,.1f} GiB are free here"
    if together * need > there:
        each = f"{together} workers need" if together > 1 else "a worker needs"
        raise UsageError(
            f"images of {sample.shape[-1]} pixels are too large: {each} {together * need / 2**30:,.0f} GiB at least, "
            f"and {has}; take a smaller --image-size, --batch-size or --width, or --accumulate"
        )


def needed_bytes(model: nn.Module, sample: torch.Tensor, images: int, tested: int, precision: str) -> int:
    """The least that a step on so many images takes, or testing so many of them; 0 where nobody can tell.

    A step keeps the output of each layer with parameters for backward, and a test the largest one only, as a step does
    where the first layers are frozen.

    Args:
        sample: one, [1, …], float32 of a model for images; its values do not count.
    """
    width = 2 if precision == "bf16" else 4  # bytes of a number
    outputs = outputs_of_layers(model, sample)
    largest = max((size for size, _ in outputs), default=0)
    kept = max(largest, sum(size for size, is_kept in outputs if is_kept))
    own = sample.numel() * sample.element_size()
    return max(images * (own + width * kept), tested * (own + width * largest)) if outputs else 0


def outputs_of_layers(model: nn.Module, sample: torch.Tensor) -> list[tuple[int, bool]]:
    """How many numbers each layer with parameters makes of a sample, and whether backward needs them; nothing of a
    model that cannot go forward without computing. It takes neither memory nor time: torch's meta device has shapes.
    """
    found: list[tuple[int, bool]] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            found.append((output.numel(), output.requires_grad))

    layers = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    state: dict[str, torch.Tensor] = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    was_training = model.training
    model.eval()
    try:
        functional_call(model, state, (torch.empty_like(sample, device="meta"),))
    except Exception:  # what a user's forward may raise where numbers are not there
        return []
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found
