"""A check, before training, that there is enough memory for a step and an evaluation.

The estimate is the least that they need.
"""

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hvdtrain.base.errors import UsageError
from hvdtrain.base.system.memory import free_memory
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.training.evaluation import EVALUATION_BATCH

# The largest sample, in numbers, that layers are computed on: an image of 64 pixels.
_SMALL_SAMPLE = 3 * 64 * 64


def check_memory(job: Job, model: nn.Module, sample: torch.Tensor, validation: int) -> None:
    """Checks that the images are not too large for the memory of this host, or of its GPU.

    Args:
        job: the job.
        model: the model.
        sample: a batch of one sample, [1, …, side], as for needed_bytes.
        validation: how many images this worker evaluates.

    Raises:
        UsageError: the images are too large.
    """
    config = job.config
    workers = job.world.workers
    images = -(-config.batch_size // (workers * config.accumulate))
    tested = min(EVALUATION_BATCH, validation)
    need = needed_bytes(model, sample, images, tested, config.precision)
    # How many workers share the memory; on several hosts nobody knows.
    sharing = 1
    if job.device.type == "cuda":
        has = torch.cuda.get_device_properties(0).total_memory
        says_has = f"a GPU here has {has / 2**30:,.1f} GiB"
        if config.share_gpu and job.world.is_local:
            sharing = -(-workers // torch.cuda.device_count())
    else:
        has = free_memory()
        says_has = f"{has / 2**30:,.1f} GiB are free here"
        if job.world.is_local:
            sharing = workers
    if sharing * need > has:
        who_needs = f"{sharing} workers need" if sharing > 1 else "a worker needs"
        raise UsageError(
            f"images of {sample.shape[-1]} pixels are too large: "
            f"{who_needs} {sharing * need / 2**30:,.0f} GiB at least, and {says_has}; "
            "take a smaller --image-size, --batch-size or --width, or --accumulate"
        )


def needed_bytes(
    model: nn.Module, sample: torch.Tensor, images: int, tested: int, precision: str
) -> int:
    """Returns the least number of bytes that a step or an evaluation takes; 0 if nobody can tell.

    A step keeps the output of each layer with parameters for backward. An evaluation keeps the
    largest output only, as a step does where the first layers are frozen.

    Args:
        model: the model.
        sample: a batch of one sample, [1, …], of float32 if the model takes images. Its values do
            not count.
        images: how many images a step computes at once.
        tested: how many images an evaluation computes at once.
        precision: --precision.
    """
    outputs = outputs_of_layers(model, sample)
    if not outputs:
        return 0
    bytes_per_number = 2 if precision == "bf16" else 4
    largest = max(size for size, _ in outputs)
    kept = max(largest, sum(size for size, is_kept in outputs if is_kept))
    sample_bytes = sample.numel() * sample.element_size()
    step_bytes = images * (sample_bytes + bytes_per_number * kept)
    test_bytes = tested * (sample_bytes + bytes_per_number * largest)
    return max(step_bytes, test_bytes)


def outputs_of_layers(model: nn.Module, sample: torch.Tensor) -> list[tuple[int, bool]]:
    """Returns the size of each layer's output, and whether backward needs it.

    The layers are those with parameters. A small sample is computed. A larger one takes no memory,
    since tensors on torch's meta device have shapes alone; but for them torch imports its compiler,
    which takes more than a second. Empty if the model's forward needs numbers that are not there.
    """
    is_small = sample.numel() <= _SMALL_SAMPLE
    found: list[tuple[int, bool]] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            found.append((output.numel(), output.requires_grad))

    layers = [
        module
        for module in model.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    # Forward may change buffers, and the model keeps those that it has.
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if not is_small:
        sample = torch.empty_like(sample, device="meta")
        state = {
            name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            functional_call(model, state, (sample,))
    except Exception:  # a user's forward may raise anything where there are no numbers
        return []
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found
