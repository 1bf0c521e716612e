"""Which device a worker computes on, and how it computes there."""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.group import Group
from hvdtrain.coordination.job import Job
from hvdtrain.errors import UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.world.place import World

GPUS_OF_HOST = Path("/proc/driver/nvidia/gpus")  # a folder each, also of those that a scheduler keeps from a job
MOST_GPUS = 16  # of one host: as many as any machine has that we know of


def choose_device(config: RunConfig, world: World) -> torch.device:
    """A GPU, which one is not decided, or the CPU.

    Raises:
        UsageError: a GPU is needed and there is none, or all ranks are here and there are fewer GPUs than workers.
    """
    gpus = torch.cuda.device_count()
    if world.is_server or config.device == "cpu" or (config.device == "auto" and not gpus):
        if config.precision == "tf32" and not world.is_server:
            raise UsageError("--precision tf32 is for GPUs, and this rank computes on a CPU: choose fp32 or bf16")
        if config.device == "auto" and world.is_chief and (there := len(list(GPUS_OF_HOST.glob("*")))):
            has = f"this host has {with_noun(there, 'GPU')}, and this job sees none: it computes on the CPU"
            print(f"hvdtrain: {has}; ask the scheduler for them (--device cuda), or give --device cpu", file=sys.stderr)
        return torch.device("cpu")
    if not gpus:
        raise UsageError("--device cuda: torch sees no GPU here; see `hvdtrain doctor`, or use --device cpu")
    one_each = gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ  # as Slurm gives them out: the ranks' are others
    if world.is_local and world.workers > gpus and not one_each and not config.share_gpu:
        raise UsageError(_too_few(f"{world.workers} workers are more than the GPUs of this host, {gpus}"))
    return torch.device("cuda")


def choose_for_all(config: RunConfig, most: int, tell: Callable[[str], None]) -> str:
    """--device for jobs of up to so many workers on this machine: all of them alike, or they could not be compared.

    Args:
        tell: called with a line where GPUs are here that are not used.

    Raises:
        UsageError: GPUs are asked for, and there are fewer than workers.
    """
    gpus = torch.cuda.device_count()
    if config.device == "auto" and 0 < gpus < most and not config.share_gpu:
        tell(
            f"all runs compute on the CPU: {most} workers need {most} GPUs, of which {gpus} are here; for GPUs give "
            "--share-gpu, or fewer --workers"
        )
        return "cpu"
    if config.device == "cuda":
        choose_device(config, World("mpirun", most - 1, most, most - 1, most))
    return config.device


def take_gpu(job: Job, group: Group) -> torch.device:
    """The GPU of this worker: the first that it sees and no worker before it has. All workers call it together.

    So a worker takes the GPU of its place among the workers of its host, whether it sees all GPUs there or was given
    one of its own.

    Raises:
        UsageError: there are fewer GPUs than workers, and they are not to share; or some workers have none.
    """
    seen = _visible_gpus() if job.device.type == "cuda" else []
    if not group.any(bool(seen)):
        return job.device
    there, rows = group.all_gather([*seen, *[0.0] * (MOST_GPUS - len(seen))])
    visible = [[int(name) for name in row if name] for row in rows.tolist()]
    if without := [job.world.servers + worker for worker, gpus in zip(there, visible, strict=True) if not gpus]:
        raise UsageError(f"ranks {without} have no GPU and others do: choose hosts that are alike, or --device cpu")
    index = assign_gpus(visible, job.config.share_gpu)[there.index(job.world.worker)]
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def any_gpu(job: Job) -> torch.device:
    """The GPU of a worker that joins a job that runs: its number modulo the GPUs of this host. It may share one."""
    if job.device.type == "cpu":
        return job.device
    index = job.world.worker % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def assign_gpus(visible: Sequence[Sequence[int]], share: bool) -> list[int]:
    """Which of the GPUs that each worker sees it takes: its place in the worker's own list.

    Args:
        visible: the names of the GPUs that each worker sees, at least one.
        share: where none is left, take one that the fewest workers have.

    Raises:
        UsageError: a worker sees none that is left.
    """
    holders: dict[int, int] = {}
    places = []
    for worker, gpus in enumerate(visible):
        place = min(range(len(gpus)), key=lambda n: holders.get(gpus[n], 0))
        if gpus[place] in holders and not share:
            raise UsageError(_too_few(f"worker {worker} of {len(visible)} finds no GPU that no worker before it has"))
        holders[gpus[place]] = holders.get(gpus[place], 0) + 1
        places.append(place)
    return places


def _too_few(what: str) -> str:
    return (
        f"{what}, and each needs its own, for NCCL and to be as fast as the others: start fewer workers, let them "
        "share, exchanging by way of CPU memory, with --share-gpu, or use --device cpu"
    )


def _visible_gpus() -> list[int]:
    """Names of the GPUs that this process sees, in its order: numbers that a float64 holds, equal for the same GPU."""
    ids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(min(MOST_GPUS, torch.cuda.device_count()))]
    return [int.from_bytes(hashlib.blake2b(uuid.encode(), digest_size=6).digest()) for uuid in ids]


def set_up(config: RunConfig) -> None:
    """Have torch compute as the configuration says. Call it before anything is computed.

    `fp32` is that: products of 24 bits. cuDNN would take TF32's 11 bits by default.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.precision == "tf32"
    torch.backends.cudnn.benchmark = not config.deterministic  # shapes are the same in every step
    if not config.deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS does not promise to repeat
    if config.compile:
        torch.use_deterministic_algorithms(True)
    else:  # the same, but for the compiler, which that would import: 1.5 s for every rank
        torch.set_deterministic_debug_mode("error")


def memory_format(config: RunConfig, device: torch.device) -> torch.memory_format:
    """How images lie in memory: channels last where tensor cores compute, which else would copy them to be so."""
    on_tensor_cores = device.type == "cuda" and config.precision != "fp32"
    return torch.channels_last if on_tensor_cores else torch.contiguous_format
