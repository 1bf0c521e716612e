"""The device that a worker computes on, and how torch computes there."""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.group import Group
from hvdtrain.job.coordination.job import Job

# It has a folder for each GPU of the host, also for GPUs that a scheduler hides from a job.
GPUS_OF_HOST = Path("/proc/driver/nvidia/gpus")
MOST_GPUS = 16  # the most GPUs of one host that we know of


def choose_device(config: RunConfig, world: World) -> torch.device:
    """Returns the CPU, or a GPU without an index: which one is decided by take_gpu.

    Raises:
        UsageError: a GPU is needed and there is none, or all ranks are here and there are fewer
            GPUs than workers.
    """
    gpus = torch.cuda.device_count()
    if world.is_server or config.device == "cpu" or (config.device == "auto" and not gpus):
        if config.precision == "tf32" and not world.is_server:
            raise UsageError(
                "--precision tf32 is for GPUs, and this rank computes on a CPU: choose fp32 or bf16"
            )
        if config.device == "auto" and world.is_chief:
            _tell_of_hidden_gpus()
        return torch.device("cpu")
    if not gpus:
        raise UsageError(
            "--device cuda: torch sees no GPU here; see `hvdtrain doctor`, or use --device cpu"
        )
    # Slurm may give each rank one GPU. The other ranks have others then.
    has_one_each = gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if world.is_local and world.workers > gpus and not has_one_each and not config.share_gpu:
        raise UsageError(
            _too_few(f"{world.workers} workers are more than the GPUs of this host, {gpus}")
        )
    return torch.device("cuda")


def _tell_of_hidden_gpus() -> None:
    """Tells the user if this host has GPUs that the job does not see."""
    gpus = len(list(GPUS_OF_HOST.glob("*")))
    if gpus:
        print(
            f"hvdtrain: this host has {with_noun(gpus, 'GPU')}, and this job sees none: "
            "it computes on the CPU; ask the scheduler for them (--device cuda), "
            "or give --device cpu",
            file=sys.stderr,
        )


def choose_for_all(config: RunConfig, most: int, tell: Callable[[str], None]) -> str:
    """Returns --device for the workers of all runs that are compared on this machine.

    It is the same for all of them, or the runs could not be compared. A run of one process may have
    a GPU still.

    Args:
        config: the configuration of the runs.
        most: the most workers of a run.
        tell: called with a line if there are GPUs that workers do not use.

    Raises:
        UsageError: --device cuda is given, and there are fewer GPUs than workers.
    """
    gpus = torch.cuda.device_count()
    if config.device == "auto" and 0 < gpus < most and not config.share_gpu:
        the_gpu = "the GPU" if gpus == 1 else "a GPU"
        are = "is" if gpus == 1 else "are"
        tell(
            f"one process has {the_gpu}, and workers the processor: {most} workers need "
            f"{most} GPUs, of which {gpus} {are} here; "
            "for GPUs give --share-gpu, or fewer --workers"
        )
        return "cpu"
    if config.device == "cuda":
        choose_device(config, World("mpirun", most - 1, most, most - 1, most))
    return config.device


def take_gpu(job: Job, group: Group) -> torch.device:
    """Returns the GPU of this worker, or the CPU. All workers call this together.

    It is the first GPU that the worker sees and no worker before it has. So the workers of a host
    take its GPUs in order, whether each of them sees all GPUs or one.

    Raises:
        UsageError: there are fewer GPUs than workers, without --share-gpu, or some workers have no
            GPU.
    """
    seen = _visible_gpus() if job.device.type == "cuda" else []
    if not group.any(bool(seen)):
        return job.device
    padding = [0.0] * (MOST_GPUS - len(seen))
    workers, rows = group.all_gather([*seen, *padding])
    visible = [[int(name) for name in row if name] for row in rows.tolist()]
    without = [
        job.world.servers + worker
        for worker, gpus in zip(workers, visible, strict=True)
        if not gpus
    ]
    if without:
        raise UsageError(
            f"ranks {without} have no GPU and others do: "
            "choose hosts that are alike, or --device cpu"
        )
    indices = assign_gpus(visible, job.config.share_gpu)
    index = indices[workers.index(job.world.worker)]
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def any_gpu(job: Job) -> torch.device:
    """Returns the GPU of a worker that joins a running job, or the CPU.

    It is the worker's number modulo the GPUs of this host, so that workers may share a GPU.
    """
    if job.device.type == "cpu":
        return job.device
    index = job.world.worker % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def assign_gpus(visible: Sequence[Sequence[int]], share: bool) -> list[int]:
    """Returns the index of each worker's GPU among the GPUs that the worker sees.

    Args:
        visible: the names of the GPUs that each worker sees, at least one.
        share: whether a worker that finds no free GPU takes one that the fewest workers have.

    Raises:
        UsageError: a worker finds no free GPU.
    """
    holders: dict[int, int] = {}
    places = []
    for worker, gpus in enumerate(visible):
        place = min(range(len(gpus)), key=lambda n: holders.get(gpus[n], 0))
        if gpus[place] in holders and not share:
            raise UsageError(
                _too_few(
                    f"worker {worker} of {len(visible)} finds no GPU that no worker before it has"
                )
            )
        holders[gpus[place]] = holders.get(gpus[place], 0) + 1
        places.append(place)
    return places


def _too_few(problem: str) -> str:
    return (
        f"{problem}, and each needs its own, for NCCL and to be as fast as the others: "
        "start fewer workers, let them share, exchanging by way of CPU memory, with --share-gpu, "
        "or use --device cpu"
    )


def _visible_gpus() -> list[int]:
    """Returns names of the GPUs that this process sees, in its order.

    A name is an integer that a float64 holds exactly. A GPU has the same name in all processes.
    """
    names = []
    for index in range(min(MOST_GPUS, torch.cuda.device_count())):
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        digest = hashlib.blake2b(uuid.encode(), digest_size=6).digest()
        names.append(int.from_bytes(digest))
    return names


def set_up(config: RunConfig) -> None:
    """Has torch compute as the configuration says. This must be called before anything is computed.

    With `fp32` products have 24 bits. By default cuDNN would take TF32's 11 bits.
    """
    allow_tf32 = config.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32
    torch.backends.cudnn.benchmark = not config.deterministic  # shapes are the same in every step
    if not config.deterministic:
        return
    # Without it cuBLAS does not promise the same results each time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.compile:
        torch.use_deterministic_algorithms(True)
    else:
        # This does the same without importing the compiler, which takes each rank 1.5 s.
        torch.set_deterministic_debug_mode("error")


def memory_format(config: RunConfig, device: torch.device) -> torch.memory_format:
    """Returns how images lie in memory.

    It is channels last where tensor cores compute, which would otherwise copy images to that.
    """
    on_tensor_cores = device.type == "cuda" and config.precision != "fp32"
    return torch.channels_last if on_tensor_cores else torch.contiguous_format
