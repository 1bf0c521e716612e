"""What a rank does once it knows where it is: serve, or build the model, train it and write down the results."""

import dataclasses
import math
import os
import resource
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hvdtrain import modes
from hvdtrain.config import RunConfig
from hvdtrain.data.augment import Augment
from hvdtrain.data.find import find
from hvdtrain.data.folder import ImageFolder, content_hash
from hvdtrain.data.loader import Loader, native_side
from hvdtrain.errors import Failure, UsageError
from hvdtrain.job import Job
from hvdtrain.manifest import manifest, weights_hash
from hvdtrain.metrics import PHASES, Recorder, write_json
from hvdtrain.models import VGG, load_pretrained
from hvdtrain.modes import Sync
from hvdtrain.progress import TrainingProgress
from hvdtrain.runfolder import Terminal
from hvdtrain.train import History, Normalise, evaluate, train
from hvdtrain.world import World

WEIGHTS = "snapshots/final.safetensors"
HOST_LETTERS = 64  # of a host's name, in bytes: what Linux allows
STALENESS_BINS = 64  # the histogram's last bin holds all that is staler


def prepare(config: RunConfig, world: World, folder: Path, threads: int) -> Callable[[Terminal], None]:
    """Find every fault that can be found before anything starts, and return this rank's task.

    Raises:
        UsageError: the data set, the device or the pretrained weights cannot be used.
    """
    data = find(config.dataset)
    if len(data.train) < world.workers:
        raise UsageError(f"{len(data.train)} training images are too few for {world.workers} workers")
    config.check_length(len(data.train))
    torch.set_num_threads(threads)
    if config.deterministic:  # not called otherwise: it imports torch's compiler, 1.5 s for every rank
        torch.use_deterministic_algorithms(True)
    job = Job(config, world, folder, choose_device(config, world), threads)
    if world.is_server:
        return lambda terminal: modes.load(config.mode).serve(job, partial(print, file=terminal.out))
    model = initial_model(config, len(data.classes))
    skipped = None
    if config.pretrained:  # on every worker: what is sent around later need not include batch-norm statistics
        skipped = load_pretrained(model, config.model, config.pretrained)
    return lambda terminal: work(job, data, model.to(job.device), skipped, terminal)


def initial_model(config: RunConfig, classes: int) -> VGG:
    """The model as training finds it: its weights depend on the seed alone."""
    torch.manual_seed(config.seed)
    return VGG(config.model, classes, config.width, config.dropout)


def seed_worker(config: RunConfig, worker: int) -> None:
    """Begin a worker's own random numbers: dropout must not be the same on every worker."""
    torch.manual_seed(config.seed * 1_000_003 + 1 + worker)


def image_side(config: RunConfig, data: ImageFolder) -> int:
    """The side, in pixels, of the images that a job trains on."""
    return config.image_size or native_side(data.train[0][0])


def choose_device(config: RunConfig, world: World) -> torch.device:
    """The GPU of this worker's place on its host, or the CPU.

    Raises:
        UsageError: a GPU was asked for and there are none, or fewer than workers.
    """
    gpus = torch.cuda.device_count()
    if world.is_server or config.device == "cpu" or (config.device == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UsageError("--device cuda: torch sees no GPU here; see `hvdtrain doctor`, or use --device cpu")
    place = world.local_rank - (world.servers if world.is_local else 0)
    if place >= gpus:
        raise UsageError(f"{place + 1} workers on this host share {gpus} GPU(s): start fewer, or use --device cpu")
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


def work(job: Job, data: ImageFolder, model: VGG, skipped: list[str] | None, terminal: Terminal) -> None:
    """Train as a worker; the first worker writes the manifest, the summary and the weights."""
    config, world = job.config, job.world
    sync: Sync = modes.load(config.mode).connect(job)
    module = sync.prepare(model)
    start = weights_hash(model)
    there, starts = _gather(sync, job, [int(start[:12], 16)])  # as much of it as a float64 holds
    differs = (starts != starts[0]).flatten().tolist()
    if different := [world.servers + worker for worker, its in zip(there, differs, strict=True) if its]:
        raise Failure(f"ranks {different} do not start from the weights of rank {world.servers}")
    hosts = _hosts(sync, job)
    side = image_side(config, data)
    loader = Loader(data.train, side, job.threads, Augment(config.augment, config.seed))
    validation = Loader(data.validation, side, job.threads)
    if world.is_chief:
        seen = {
            "dataset_hash": content_hash(data), "image_size": side, "classes": len(data.classes),
            "train_samples": len(data.train), "validation_samples": len(data.validation),
            "initial_weights": f"blake2b:{start}",
        }  # fmt: skip
        write_json(job.folder / "manifest.json", manifest(job, sync, model, hosts, seen))
    seed_worker(config, world.worker)
    progress = TrainingProgress(terminal.out, config.total_steps(len(data.train)), world.is_chief)
    allowed, starters = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    if allowed < starters:
        progress.say(f"this worker may use {len(allowed)} of {len(starters)} cores: with mpirun, add --bind-to none")
    for line in (skipped or []) if world.is_chief else []:
        progress.say(f"--pretrained skipped {line}")
    recorder = Recorder(job.folder, world.rank, world.is_chief)
    try:
        history = train(job, model, sync, module, loader, validation, recorder, progress)
    finally:
        progress.close()
        recorder.close()
    summary = summarise(job, sync, recorder, history)
    if world.is_chief:
        save_file({k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}, job.folder / WEIGHTS)
        write_json(job.folder / "summary.json", summary)
        if not math.isfinite(summary["val_loss"]):
            progress.say(f"training diverged: the validation loss is {summary['val_loss']}; try a lower --lr")
        progress.say(f"wrote {job.folder}")
    sync.close()


def summarise(job: Job, sync: Sync, recorder: Recorder, history: History) -> dict[str, Any]:
    """The summary of a run over all workers; every worker calls it together, and gets the same."""
    workers = job.world.workers
    histogram = [0.0] * STALENESS_BINS
    for staleness, count in recorder.staleness.items():
        histogram[min(staleness, STALENESS_BINS - 1)] += count
    stale_sum = sum(s * n for s, n in recorder.staleness.items())
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**20
    there, rows = _gather(
        sync, job,
        [recorder.steps, history.digest, rss, history.wall_s, stale_sum,
         max(recorder.staleness, default=0), *(recorder.seconds[p] for p in PHASES), *histogram],
    )  # fmt: skip
    steps, digest, rss, wall, stale_sum, stale_max = rows[:, :6].T
    seconds = rows[:, 6 : 6 + len(PHASES)].sum(0) / steps.sum()
    counts = {str(i): int(n) for i, n in enumerate(rows[:, 6 + len(PHASES) :].sum(0).tolist()) if n}
    last = history.evaluations[-1]
    reached = [e["train_s"] for e in history.evaluations if e["val_accuracy"] >= job.config.target_accuracy]
    has_staleness = bool(counts)
    return {
        "status": "done",
        "steps": int(steps.max()),
        "samples": history.samples,
        "wall_s": wall.max().item(),
        "samples_per_s": history.samples / wall.max().item(),
        "val_accuracy": last["val_accuracy"],
        "val_loss": last["val_loss"],
        "target_accuracy": job.config.target_accuracy,
        "time_to_target_s": reached[0] if reached else None,
        "exposed_comm_fraction": (seconds[PHASES.index("comm")] / seconds.sum()).item(),
        "bytes_sent_per_step": sync.bytes_per_step,
        "staleness_mean": stale_sum.sum().item() / sum(counts.values()) if has_staleness else None,
        "staleness_max": int(stale_max.max()) if has_staleness else None,
        "staleness_histogram": counts,
        "peak_rss_mb": rss.sum().item() + sync.servers_rss_mb(),
        # As whole numbers: a float64 holds no more than 32 digests added up.
        "samples_digest": f"{sum(map(int, digest.tolist())) % 2**48:012x}",
        "step_seconds": dict(zip(PHASES, seconds.tolist(), strict=True)),
        "workers": workers,
        "lost_workers": [job.world.servers + worker for worker in range(workers) if worker not in there],  # ranks
        "evaluations": history.evaluations,
    }


def _gather(sync: Sync, job: Job, row: list[float]) -> tuple[list[int], torch.Tensor]:
    """Which workers are there, and their rows, [those workers, len(row)] float64, on every worker."""
    rows = torch.zeros(job.world.workers, 1 + len(row), dtype=torch.float64)
    rows[job.world.worker] = torch.tensor([1.0, *row], dtype=torch.float64)
    rows = sync.sum(rows)
    there = rows[:, 0].nonzero().flatten().tolist()
    return there, rows[there, 1:]


def _hosts(sync: Sync, job: Job) -> list[str]:
    """The names of all hosts that have a rank, sorted; workers tell each other, letter by letter."""
    own = socket.gethostname().encode()[:HOST_LETTERS]
    _, rows = _gather(sync, job, [*own.ljust(HOST_LETTERS, b"\0")])
    names = {bytes(map(int, row)).rstrip(b"\0").decode(errors="replace") for row in rows.tolist()}
    return sorted(names | set(sync.server_hosts()))


def test(run: Path, config: RunConfig, own: ImageFolder, data: ImageFolder) -> tuple[float, float]:
    """Mean loss and accuracy of a run's saved weights over the validation images of `data`.

    Args:
        own: the data set the run was trained on, which decides the side of its images.

    Raises:
        UsageError: the run saved no weights, or they are not this model's.
    """
    alone = dataclasses.replace(config, mode="single", servers=0)
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    job = Job(alone, World(), run, choose_device(alone, World()), threads)
    model = initial_model(config, len(own.classes)).to(job.device)
    try:
        model.load_state_dict(load_file(run / WEIGHTS, device=str(job.device)))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{run / WEIGHTS} cannot be read as the weights of {config.model}: {reason}") from None
    loader = Loader(data.validation, image_side(config, own), threads)
    return evaluate(job, model, modes.load("single").connect(job), loader, Normalise(job.device))
