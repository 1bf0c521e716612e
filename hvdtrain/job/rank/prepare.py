"""A rank before anything starts: it finds every fault, and is then ready to serve or train."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.numerics.split import even_range
from hvdtrain.base.system import trace
from hvdtrain.base.system.terminal import Terminal
from hvdtrain.base.world.place import World
from hvdtrain.data.find import find_dataset_of
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.identity import identity
from hvdtrain.data.loader import example
from hvdtrain.data.names import order_of_numbers
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.rank.script import run_as_worker
from hvdtrain.job.rank.worker import train_as_worker
from hvdtrain.job.recording.snapshot import Snapshot
from hvdtrain.job.training import device, resume
from hvdtrain.job.training.lone_samples import check_lone_samples
from hvdtrain.job.training.memory import check_memory
from hvdtrain.job.training.model import initial_model, load_weights, trial_inputs, waits_for
from hvdtrain.runs.request import check_length, check_starts_again
from hvdtrain.runs.scripts import check_script

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A rank that is ready to begin.

    Attributes:
        run: serves or trains, and returns when that is over.
        resumed: the snapshot that training goes on from, on the first worker.
        finished: whether there is nothing left to do.
    """

    run: Callable[[Terminal], None]
    resumed: Snapshot | None = None
    finished: bool = False


def prepare(
    config: RunConfig,
    world: World,
    folder: Path,
    threads: int,
    resuming: bool,
    store: "Store | None" = None,
) -> Prepared:
    """Returns a rank that is ready to serve or train.

    Args:
        config: the configuration of the run.
        world: where this rank is.
        folder: the run folder.
        threads: how many threads this rank computes with.
        resuming: whether to go on with the run in the folder.
        store: the store of all ranks, if they have met already.

    Raises:
        UsageError: the data set, the device, the pretrained weights or the snapshot cannot be used.
    """
    if config.script:
        config = _of_script(config, resuming)
    data = None
    samples = None
    if not (world.is_server or config.script):
        data = _find_images(config, world)
        samples = len(data.train)
    if resuming and resume.is_finished(folder, config, samples):
        return Prepared(lambda terminal: None, finished=True)
    torch.set_num_threads(threads)
    device.set_up(config)
    if config.trace:
        trace.begin(config.trace_steps)
    chosen = device.choose_device(config, world)
    _check_device(config, world, chosen)
    steps = config.total_steps(samples) if samples else None
    job = Job(config, world, folder, chosen, threads, store, steps)
    if config.script and not world.is_server:
        check_script(config)
        job = dataclasses.replace(job, steps=config.steps or None)
        return Prepared(partial(run_as_worker, job))
    if data is None:
        return Prepared(partial(_serve, job))
    return _prepare_worker(job, data, resuming)


def _of_script(config: RunConfig, resuming: bool) -> RunConfig:
    """Returns the configuration of a script's job, whose workers have samples of their own.

    Raises:
        UsageError: a run was to go on, which a script does by itself.
    """
    if resuming:
        raise UsageError(
            "--resume is not for --script: give another --out, and let the script load what "
            "job.save has written"
        )
    is_leased = "leased" in modes.declared(config.mode).shares
    return dataclasses.replace(config, shares="equal") if is_leased else config


def _serve(job: Job, terminal: Terminal) -> None:
    modes.load(job.config.mode).serve(job, partial(print, file=terminal.out))


def _prepare_worker(job: Job, data: ImageFolder, resuming: bool) -> Prepared:
    config = job.config
    world = job.world
    inputs = trial_inputs(config, data)
    model = initial_model(config, len(data.classes), inputs)
    job = dataclasses.replace(job, wait_for=waits_for(config, model, inputs))
    side = config.image_size or data.image_size
    # A side that nobody knows yet will be 224 pixels at most: such images need no check.
    if side:
        sample = example(data.train, side, 1)
        most_evaluated = len(even_range(len(data.validation), 0, world.workers))
        check_memory(job, model, sample, most_evaluated)
    if inputs is not None:
        check_lone_samples(config, [world.workers], len(data.train), model, inputs[:1])
    # Every worker loads them: the first worker's weights, which all take later, may lack batch-norm
    # statistics.
    skipped = []
    if config.pretrained:
        skipped = [*load_weights(model, config), *order_of_numbers(data.classes)]
    data = dataclasses.replace(data, known_hash=identity(data))  # this may take a while
    resumed = None
    if resuming:
        resumed = resume.find(job.folder, config, data, world.is_chief)
    if resumed:
        _load_snapshot(model, resumed)

    def run(terminal: Terminal) -> None:
        train_as_worker(job, data, model, terminal, resumed=resumed, skipped=skipped)

    return Prepared(run, resumed)


def _find_images(config: RunConfig, world: World) -> ImageFolder:
    """Returns the data set.

    Raises:
        UsageError: there is none, or it has too few images for this job.
    """
    data = find_dataset_of(config)
    if len(data.train) < world.workers:
        raise UsageError(
            f"{len(data.train)} training images are too few for {world.workers} workers"
        )
    check_length(config, len(data.train))
    return data


def _check_device(config: RunConfig, world: World, chosen: torch.device) -> None:
    """Checks that the device and this machine can do what the configuration asks for.

    Raises:
        UsageError: they cannot.
    """
    if config.record and chosen.type == "cuda":
        raise UsageError(
            "--record is for --device cpu: replay computes there, and a GPU rounds otherwise"
        )
    if world.elastic and chosen.type == "cuda":
        raise UsageError(
            "--elastic is for CPUs, where Gloo carries the messages: give --device cpu"
        )
    if world.elastic:
        check_starts_again(config.mode)
    if not config.compile or world.is_server:
        return
    compiler = os.environ.get("CXX") or "g++"
    if not shutil.which(compiler):
        raise UsageError("--compile needs a C++ compiler: install g++, or let CXX name one")


def _load_snapshot(model: nn.Module, resumed: Snapshot) -> None:
    """Loads a snapshot's weights into the model.

    Raises:
        UsageError: the weights are another model's.
    """
    try:
        model.load_state_dict(resumed.weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split()[:30])
        raise UsageError(f"{resumed.folder} has not the weights of this model: {reason}") from None
