"""A worker: it connects to the others, trains, and writes the results."""

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hvdtrain.base import modes
from hvdtrain.base.errors import Failure
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.numerics.flat import trained
from hvdtrain.base.numerics.optimizers import check_vectors
from hvdtrain.base.numerics.slowdown import Slowdown
from hvdtrain.base.numerics.split import even_range
from hvdtrain.base.system.preempt import Terminated, deferred_sigterm
from hvdtrain.base.system.terminal import Terminal
from hvdtrain.data.augment import Augment
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.loader import Batches, open_loader
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.coordination.synchroniser import Synchroniser
from hvdtrain.job.rank.alike import begin
from hvdtrain.job.rank.results import finish, finish_trace
from hvdtrain.job.rank.start import Start
from hvdtrain.job.rank.summary import HostLoads, Measured
from hvdtrain.job.recording.metrics import Recorder
from hvdtrain.job.recording.snapshot import Snapshot
from hvdtrain.job.training import device, resume
from hvdtrain.job.training.barrier import Departed
from hvdtrain.job.training.evaluation import statistics
from hvdtrain.job.training.loop import Training, train
from hvdtrain.job.training.model import evaluation_resize, image_side
from hvdtrain.job.training.progress import TrainingProgress
from hvdtrain.job.training.saver import Saver
from hvdtrain.runs.folder import leave_file


@dataclasses.dataclass(frozen=True)
class _Loaders:
    """The images that a worker reads.

    Attributes:
        training: the training images.
        validation: the validation images.
        test: opens the test images; None if there is no test.
    """

    training: Batches
    validation: Batches
    test: Callable[[], Batches] | None


def train_as_worker(
    job: Job,
    data: ImageFolder,
    model: nn.Module,
    terminal: Terminal,
    resumed: Snapshot | None = None,
    skipped: Sequence[str] = (),
    arrival: Arrival | None = None,
) -> None:
    """Trains as a worker. The worker that leads writes manifest, snapshots, summary and weights.

    Args:
        job: the job.
        data: the images.
        model: the model.
        terminal: where the user is told.
        resumed: the snapshot to go on from, on the first worker.
        skipped: lines about pretrained weights, such as layers that they do not fit.
        arrival: how this worker has joined a running job; None if it was there at the start.
    """
    config = job.config
    world = job.world
    sync = _connect(job, arrival)
    if arrival:
        job = dataclasses.replace(job, device=device.any_gpu(job))
    else:
        job = dataclasses.replace(job, device=device.take_gpu(job, sync.group))
        resumed = resume.share(job.folder, resumed, sync.group)
    module = _prepare(job, model, sync, resumed)
    start = _start(job, resumed, arrival)
    side = image_side(config, data)
    if arrival:
        _take_state(model, sync, arrival.state)
    else:
        begin(job, data, side, model, sync, resumed, terminal)
    loaders = _open_loaders(job, data, side, start)
    progress = TrainingProgress(
        terminal.out,
        job.steps,
        world.is_chief,
        config.log_every,
        world.workers,
        first_step=start.step,
    )
    sync.report = progress.print
    _tell_place(job, progress, terminal)
    if resumed:
        _tell_resumed(job, resumed, progress)
    elif arrival:
        _tell_joined(arrival, terminal)
    else:
        for line in skipped:
            progress.print(line)
    recorder = Recorder(
        job.folder,
        world.rank,
        is_chief=world.is_chief and not config.sprint,
        after=start.step,
        tally=start.tally,
        appends=start.joins,
        leased=not modes.declared(config.mode).lockstep,
    )
    slowdown = Slowdown(config.slow, world.worker, config.seed)
    slowdown.computed_s, slowdown.slept_s = start.slowed
    keeps_best = config.saves("best") or bool(data.test)  # the best model is tested
    saver = Saver(job, model, sync, recorder, start.step, keeps_best, progress.print, slowdown)
    training = Training(
        job, model, module, sync, recorder, progress, saver, start.history, slowdown, start.age_s
    )
    _train_to_its_end(training, loaders, start.step, terminal)


def _connect(job: Job, arrival: Arrival | None) -> Synchroniser:
    mode = modes.load(job.config.mode)
    sync: Synchroniser
    if arrival:  # of modes that workers can join
        sync = mode.connect(job, arrival)
    else:
        sync = mode.connect(job)
    return sync


def _prepare(job: Job, model: nn.Module, sync: Synchroniser, resumed: Snapshot | None) -> Any:
    """Connects the model with the other workers, and returns what forward is called on.

    Model and synchroniser take the state of the snapshot, if there is one.
    """
    if resumed:
        model.load_state_dict(resumed.weights)
    module: Any = sync.prepare(model.to(job.device))
    if job.config.compile:
        # Static shapes: there are two or three, and each is compiled.
        module = torch.compile(module, dynamic=False)
    if resumed:
        check_vectors(resumed.own.tensors, sum(p.numel() for p in trained(model)))
        sync.restore(resumed.step, resumed.optimizer, resumed.own)
    return module


def _start(job: Job, resumed: Snapshot | None, arrival: Arrival | None) -> Start:
    if arrival:
        return Start.beside(arrival)
    if resumed:
        return Start.after(resumed, job.config, job.world)
    return Start()


def _take_state(model: nn.Module, sync: Synchroniser, state: Mapping[str, Any]) -> None:
    """Takes the state of the other workers.

    In a ring the state includes weights and the optimizer's state. In other modes the servers have
    these.
    """
    if "weights" in state:
        model.load_state_dict(state["weights"])
        sync.restore(state["step"], state["optimizer"])
    for buffer, values in zip(statistics(model), state["buffers"], strict=True):
        buffer.copy_(values)


def _open_loaders(job: Job, data: ImageFolder, side: int, start: Start) -> _Loaders:
    """Opens the training and validation images.

    The loaders are told which samples this worker reads soon.
    """
    config = job.config
    world = job.world
    # If shares are leased, a worker may get any share of a batch.
    place = (0, 1)
    if modes.declared(config.mode).lockstep:
        place = (world.worker, world.workers)
    sampler = BatchSampler(
        len(data.train), config.batch_size, config.seed, *place, config.shuffle_block
    )
    augment = Augment(config.augment, config.seed)
    resize = evaluation_resize(config, side)
    soon_trained = () if start.joins else sampler.needed(start.step, job.steps)
    soon_validated: Sequence[int] = ()
    if not (start.joins or config.sprint):
        soon_validated = even_range(len(data.validation), world.worker, world.workers)
    training = open_loader(data.train, side, job.threads, augment, soon=soon_trained)
    validation = open_loader(data.validation, side, job.threads, None, resize, soon_validated)
    test = None
    if data.test and not config.sprint:
        test = partial(open_loader, data.test, side, job.threads, resize=resize)
    return _Loaders(training, validation, test)


def _tell_place(job: Job, progress: TrainingProgress, terminal: Terminal) -> None:
    """Tells which GPU this worker computes on, and if it has fewer cores than its starter."""
    allowed = os.sched_getaffinity(0)
    of_starter = os.sched_getaffinity(os.getppid())
    if allowed < of_starter:
        progress.print(
            f"this worker may use {len(allowed)} of {len(of_starter)} cores: "
            "with mpirun, add --bind-to none"
        )
    if job.device.type == "cuda":
        gpu = torch.cuda.get_device_name(job.device)
        print(
            f"rank {job.world.rank} computes on {job.device}, {gpu}", file=terminal.out, flush=True
        )


def _tell_resumed(job: Job, resumed: Snapshot, progress: TrainingProgress) -> None:
    before = resumed.state["parts"][-1]
    workers = with_noun(before["workers"], "worker")
    servers = with_noun(before["servers"], "server")
    until = f"until then {before['mode']} with {workers} and {servers}"
    if job.steps and resumed.step >= job.steps:
        until += f"; of {job.steps} steps nothing is left to do"
    progress.print(f"going on after step {resumed.step}, from {resumed.folder}; {until}")


def _tell_joined(arrival: Arrival, terminal: Terminal) -> None:
    life = f", whose life number {arrival.incarnation} this is" if arrival.incarnation > 1 else ""
    print(f"hvdtrain: rank {arrival.world.rank} has joined{life}", file=terminal.out, flush=True)


def _train_to_its_end(
    training: Training, loaders: _Loaders, first_step: int, terminal: Terminal
) -> None:
    """Trains, and writes the results; after a SIGTERM a snapshot alone.

    Args:
        training: the training.
        loaders: the images.
        first_step: the step of the snapshot that training goes on from, or 0.
        terminal: where the user is told.

    Raises:
        Terminated: a SIGTERM has come.
    """
    job = training.job
    sync = training.sync
    with deferred_sigterm(leave_file(job.folder)):
        try:
            host_loads = HostLoads(sync)
            processor_s = train(training, loaders.training, loaders.validation)
        except Terminated:
            _end_early(training)
            sync.group.close()
            raise
        except Departed:
            sync.leave_alone()
            step = training.history.step
            left = f"hvdtrain: rank {job.world.rank} has left at step {step}"
            print(left, file=terminal.out, flush=True)
            return
        finally:
            training.progress.close()
            training.recorder.close()
        # A SIGTERM from now on has nothing left to end.
        measured = Measured(first_step, processor_s, host_loads)
        test = loaders.test() if loaders.test else None
        finish(training, measured, test)


def _end_early(training: Training) -> None:
    """Tells, after a SIGTERM, which snapshot there is to go on from, and writes the trace."""
    job = training.job
    progress = training.progress
    if job.config.sprint:
        progress.print("ended by SIGTERM: a sprint saves nothing")
        return
    last = training.saver.last
    saved = f"the last snapshot is of step {last}" if last else "no snapshot could be saved"
    progress.print(
        f"ended by SIGTERM at step {training.history.step}; {saved}: "
        f"go on with --resume --out {shlex.quote(str(job.folder))}"
    )
    if not job.config.trace:
        return
    try:
        finish_trace(job, training.sync, progress)
    except (Failure, OSError, RuntimeError) as error:  # the snapshot is what counts
        progress.print(f"the trace could not be written: {error}")
