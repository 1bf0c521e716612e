"""What a rank does once it knows where it is: serve, or build the model, train it and leave the results."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hvdtrain import models, modes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.joining import Arrival
from hvdtrain.coordination.synchroniser import Synchroniser
from hvdtrain.data.augment import Augment
from hvdtrain.data.bad_images import summary_of
from hvdtrain.data.find import find_dataset
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.identity import identity
from hvdtrain.data.image import native_side
from hvdtrain.data.loader import Batches, example, open_loader
from hvdtrain.data.sampling import BatchSampler
from hvdtrain.data.storage import locked
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import some_of, with_noun
from hvdtrain.models.layers import Network
from hvdtrain.models.own import code_hash, read_early
from hvdtrain.models.pretrained import cached_weights, load_pretrained
from hvdtrain.numerics.slowdown import Slowdown
from hvdtrain.numerics.split import even_range
from hvdtrain.rank.results import finish, finish_trace
from hvdtrain.rank.start import Start
from hvdtrain.rank.summary import HostLoads
from hvdtrain.runs.folder import leave_file, write_json
from hvdtrain.runs.manifest import by_host, manifest, part, weights_hash
from hvdtrain.runs.metrics import Recorder
from hvdtrain.runs.request import check_length, choice
from hvdtrain.runs.snapshot import Snapshot
from hvdtrain.system import trace
from hvdtrain.system.own_code import is_code
from hvdtrain.system.preempt import Terminated, deferred_sigterm
from hvdtrain.system.terminal import Terminal
from hvdtrain.training import device, resume
from hvdtrain.training.barrier import Departed
from hvdtrain.training.evaluation import statistics
from hvdtrain.training.loop import Training, train
from hvdtrain.training.memory import check_memory
from hvdtrain.training.progress import TrainingProgress
from hvdtrain.training.saver import MANIFEST, Saver
from hvdtrain.world.host import describe, differences, gpus, speed_variables
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A rank that is ready to begin: every fault that could be found has been.

    Attributes:
        run: serve or train, until that is done.
        resumed: the snapshot that it goes on from, on the first worker.
        finished: there is nothing left to do.
    """

    run: Callable[[Terminal], None]
    resumed: Snapshot | None = None
    finished: bool = False


def prepare(
    config: RunConfig, world: World, folder: Path, threads: int, resuming: bool, store: "Store | None" = None
) -> Prepared:  # fmt: skip
    """Find every fault that can be found before anything starts.

    Args:
        resuming: go on with the run in the folder, if there is one.
        store: where all ranks have met already.

    Raises:
        UsageError: the data set, the device, the pretrained weights or the snapshot cannot be used.
    """
    data = None if world.is_server else _images(config, world)  # a server needs none
    if resuming and resume.is_finished(folder, config, len(data.train) if data is not None else None):
        return Prepared(lambda terminal: None, finished=True)
    torch.set_num_threads(threads)
    device.set_up(config)
    if config.trace:
        trace.begin(config.trace_steps)
    chosen = device.choose_device(config, world)
    if config.record and chosen.type == "cuda":
        raise UsageError("--record is for --device cpu: replay computes there, and a GPU rounds otherwise")
    if world.elastic and chosen.type == "cuda":
        raise UsageError("--elastic is for CPUs, where Gloo carries the messages: give --device cpu")
    if config.compile and not world.is_server and not shutil.which(os.environ.get("CXX") or "g++"):
        raise UsageError("--compile needs a C++ compiler: install g++, or let CXX name one")
    steps = config.total_steps(len(data.train)) if data else None
    job = Job(config, world, folder, chosen, threads, store, steps)
    if data is None:
        return Prepared(lambda terminal: modes.load(config.mode).serve(job, partial(print, file=terminal.out)))
    inputs = trial_inputs(config, data)
    model = initial_model(config, len(data.classes), inputs)
    job = dataclasses.replace(job, wait_for=waits_for(config, model, inputs))
    if side := config.image_size or data.image_size:  # others are no more than 224
        sample = example(data.train, side, 1)
        check_memory(job, model, sample, len(even_range(len(data.validation), 0, world.workers)))
    # On every worker: what is sent around later need not include batch-norm statistics.
    skipped = load_weights(model, config) if config.pretrained else None
    data = dataclasses.replace(data, known_hash=identity(data))  # which may take a while
    resumed = resume.find(folder, config, data, world.is_chief) if resuming else None
    if resumed:
        try:
            model.load_state_dict(resumed.weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split()[:30])
            raise UsageError(f"{resumed.folder} has not the weights of this model: {reason}") from None
    return Prepared(lambda terminal: train_as_worker(job, data, model, skipped, resumed, terminal), resumed)


def _images(config: RunConfig, world: World) -> ImageFolder:
    """UsageError where there are none, or too few for what is asked."""
    data = find_dataset(config.dataset, config.skip_bad)
    if len(data.train) < world.workers:
        raise UsageError(f"{len(data.train)} training images are too few for {world.workers} workers")
    check_length(config, len(data.train))
    return data


def trial_inputs(config: RunConfig, data: ImageFolder) -> torch.Tensor | None:
    """Two samples, [2, …], with which a model is tried before anything begins, where it or the data is not ours."""
    if not (models.is_own(config.model) or is_code(config.dataset)):
        return None
    return example(data.train, image_side(config, data), 2)


def initial_model(config: RunConfig, classes: int, inputs: torch.Tensor | None = None) -> nn.Module:
    """The model as training finds it: its weights depend on the seed alone.

    Args:
        inputs: see trial_inputs.

    Raises:
        UsageError: it cannot be trained here, or not on such samples.
    """
    torch.manual_seed(config.seed)
    model = models.make(config.model, classes, config.taken_width, config.dropout, inputs)
    if config.freeze == "features":
        cast(Network, model).features.requires_grad_(False)
    return model


def waits_for(config: RunConfig, model: nn.Module, inputs: torch.Tensor | None) -> str:
    """What waits for fresh weights. Where a user's forward reads weights before the layer that has them begins, that is
    the step. UsageError where layers were to wait.
    """
    wait_for = choice(config, "wait_for")
    if wait_for == "layer" and inputs is not None and (name := read_early(model, inputs)):
        if config.wait_for == "layer":
            raise UsageError(
                f"--wait-for layer: {config.model} reads its parameter {name} before the layer that has it begins: "
                "take --wait-for step"
            )
        return "step"
    return wait_for


def load_weights(model: nn.Module, config: RunConfig) -> list[str]:
    """As load_pretrained; of several processes of a host one downloads what is not there yet."""
    file = cached_weights(config.model) if config.pretrained == "imagenet" else None
    with locked(file) if file and not file.exists() else nullcontext():
        return load_pretrained(model, config.model, config.pretrained)


def image_side(config: RunConfig, data: ImageFolder) -> int:
    """The side, in pixels, of the images that a job trains on; 0 of a user's own data."""
    if is_code(config.dataset):
        return 0
    return config.image_size or native_side(data)


def evaluation_resize(config: RunConfig, side: int) -> int:
    """What data.loader.Loader takes as `resize` to evaluate: published weights were tested so."""
    return 256 if side == 224 and config.pretrained == "imagenet" else 0


def train_as_worker(
    job: Job, data: ImageFolder, model: nn.Module, skipped: list[str] | None, resumed: Snapshot | None,
    terminal: Terminal, arrival: Arrival | None = None,
) -> None:  # fmt: skip
    """Train as a worker; the one that leads, the first as a rule, writes the manifest, the snapshots, the summary and
    the weights.

    Args:
        arrival: of one that joins a job that runs.
    """
    config, world = job.config, job.world
    sync: Synchroniser = modes.load(config.mode).connect(job, *([arrival] if arrival else []))
    job = dataclasses.replace(job, device=device.any_gpu(job) if arrival else device.take_gpu(job, sync.group))
    if not arrival and (resumed := resume.share(job.folder, resumed, sync.group)):
        model.load_state_dict(resumed.weights)
    module: Any = sync.prepare(model.to(job.device))
    if config.compile:
        module = torch.compile(module, dynamic=False)  # for each shape, of which there are two or three
    if resumed:
        sync.restore(resumed.step, resumed.optimizer)
    start = Start.beside(arrival) if arrival else Start.after(resumed, config, world) if resumed else Start()
    side = image_side(config, data)
    if arrival:
        _take_state(model, sync, arrival.state)
    else:
        _begin(job, data, side, model, sync, resumed, terminal)
    loader, validation = _loaders(job, data, side, start)
    progress = TrainingProgress(
        terminal.out, job.steps, world.is_chief, config.log_every, world.workers,
        first_step=start.step,
    )  # fmt: skip
    sync.report = progress.print
    _tell(job, progress, terminal, resumed, arrival, [f"--pretrained skipped {line}" for line in skipped or ()])
    leased = not modes.declared(config.mode).lockstep
    writes_events = world.is_chief and not config.sprint
    recorder = Recorder(job.folder, world.rank, writes_events, start.step, start.tally, start.joins, leased)
    slowdown = Slowdown(config.slow, world.worker, config.seed)
    slowdown.computed_s, slowdown.slept_s = start.slowed
    keeps_best = config.saves("best") or bool(data.test)  # with which test images are tested
    saver = Saver(job, model, sync, recorder, start.step, keeps_best, progress.print, slowdown)
    training = Training(job, model, module, sync, recorder, progress, saver, start.history, slowdown, start.age_s)
    test = partial(open_loader, data.test, side, job.threads, resize=evaluation_resize(config, side))
    tests = data.test and not config.sprint
    _train_to_its_end(training, loader, validation, test if tests else None, start.step, terminal)


def _take_state(model: nn.Module, sync: Synchroniser, state: Mapping[str, Any]) -> None:
    """Have what the others have come to. In a ring they have weights and the optimizer's state too."""
    if "weights" in state:
        model.load_state_dict(state["weights"])
        sync.restore(state["step"], state["optimizer"])
    for buffer, values in zip(statistics(model), state["buffers"], strict=True):
        buffer.copy_(values)


def _loaders(job: Job, data: ImageFolder, side: int, start: Start) -> tuple[Batches, Batches]:
    """Of images to train with, and to evaluate on."""
    config, world = job.config, job.world
    lockstep = modes.declared(config.mode).lockstep
    place = (world.worker, world.workers) if lockstep else (0, 1)  # a worker may lease any share
    sampler = BatchSampler(len(data.train), config.batch_size, config.seed, *place, config.shuffle_block)
    soon = () if start.joins else sampler.needed(start.step, job.steps)
    own = () if start.joins or config.sprint else even_range(len(data.validation), world.worker, world.workers)
    return (
        open_loader(data.train, side, job.threads, Augment(config.augment, config.seed), soon=soon),
        open_loader(data.validation, side, job.threads, None, evaluation_resize(config, side), own),
    )


def _tell(
    job: Job, progress: TrainingProgress, terminal: Terminal, resumed: Snapshot | None, arrival: Arrival | None,
    advice: list[str],
) -> None:  # fmt: skip
    """Where this worker computes, and after what it goes on; advice is for a job's first start."""
    allowed, starters = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    if allowed < starters:
        progress.print(f"this worker may use {len(allowed)} of {len(starters)} cores: with mpirun, add --bind-to none")
    if job.device.type == "cuda":
        gpu = torch.cuda.get_device_name(job.device)
        print(f"rank {job.world.rank} computes on {job.device}, {gpu}", file=terminal.out, flush=True)
    if resumed:
        was = resumed.state["parts"][-1]
        size = f"{with_noun(was['workers'], 'worker')} and {with_noun(was['servers'], 'server')}"
        until = f"until then {was['mode']} with {size}"
        if job.steps and resumed.step >= job.steps:
            until += f"; of {job.steps} steps nothing is left to do"
        progress.print(f"going on after step {resumed.step}, from {resumed.folder}; {until}")
    elif arrival:
        life = f", whose life number {arrival.incarnation} this is" if arrival.incarnation > 1 else ""
        print(f"hvdtrain: rank {job.world.rank} has joined{life}", file=terminal.out, flush=True)
    else:
        for line in advice:
            progress.print(line)


def _train_to_its_end(
    training: Training, loader: Batches, validation: Batches, test: Callable[[], Batches] | None, first_step: int,
    terminal: Terminal,
) -> None:  # fmt: skip
    """Train, and leave the results; or a snapshot and no more, where a SIGTERM has come.

    Args:
        test: makes what tests, where there are images for it.
        first_step: the step of the snapshot that training goes on from, or 0.
    """
    job, sync, progress, history = training.job, training.sync, training.progress, training.history
    with deferred_sigterm(leave_file(job.folder)):
        try:
            beside = HostLoads(sync)
            processor_s = train(training, loader, validation)
        except Terminated:
            if job.config.sprint:
                progress.print("ended by SIGTERM: a sprint saves nothing")
                sync.group.close()
                raise
            last = training.saver.last
            said = f"the last snapshot is of step {last}" if last else "no snapshot could be saved"
            progress.print(f"ended by SIGTERM at step {history.step}; {said}: go on with --resume --out {job.folder}")
            if job.config.trace:
                try:
                    finish_trace(job, sync, progress)
                except (Failure, OSError, RuntimeError) as error:  # the snapshot is what counts
                    progress.print(f"the trace could not be written: {error}")
            sync.group.close()
            raise
        except Departed:
            sync.leave_alone()
            print(f"hvdtrain: rank {job.world.rank} has left at step {history.step}", file=terminal.out, flush=True)
            return
        finally:
            progress.close()
            training.recorder.close()
        finish(
            training, processor_s, beside, first_step, test() if test else None
        )  # a SIGTERM now has nothing left to end


def _begin(
    job: Job, data: ImageFolder, side: int, model: nn.Module, sync: Synchroniser, resumed: Snapshot | None,
    terminal: Terminal,
) -> None:  # fmt: skip
    """Check that all workers start from the same weights, and have the same images; the first writes the manifest, and
    tells in what the hosts differ. They call it together.

    Raises:
        Failure: they do not.
    """
    world, before = job.world, resumed.state if resumed else {}
    start = weights_hash(model)
    images = data.known_hash
    own = {"gpus": gpus(), "threads_per_worker": job.threads, "environment": speed_variables()}
    code = code_hash(job.config.model)
    of_workers = sync.group.gather_to_first(
        {"code": code, "weights": start, "images": images, "host": describe() | own}
    )  # fmt: skip
    of_ranks = {world.servers + worker: its for worker, its in of_workers.items()}
    if problem := sync.group.sentence(_do_not_start_alike(of_ranks)):
        raise Failure(problem)
    if not world.is_chief:
        return
    if data.passed_over:
        print(
            f"not used in the class folders: {data.passed_over}; `hvdtrain data check {data.root}` names them",
            file=terminal.out, flush=True,
        )  # fmt: skip
    if data.bad:
        print(f"--skip-bad left out {with_noun(len(data.bad), 'damaged image')}: {some_of(data.bad)}",
              file=terminal.out, flush=True)  # fmt: skip
    of_servers = sync.ask_servers("host")
    server_environment = [facts.pop("environment") for facts in of_servers]  # a host's is its workers'
    hosts = by_host({rank: its["host"] for rank, its in of_ranks.items()} | dict(enumerate(of_servers)))
    for line in differences(hosts):
        print(f"hosts differ: {line}", file=terminal.out, flush=True)
    facts = manifest(job, sync.backend, model, hosts, server_environment, {
        "dataset_hash": before.get("dataset_hash") or images, "image_size": side,
        "classes": len(data.classes), "train_samples": len(data.train), "validation_samples": len(data.validation),
        "initial_weights": before.get("initial_weights", f"blake2b:{start}"),
        "model_hash": code, "bad_images": summary_of(data.bad),
    })  # fmt: skip
    facts["parts"] = [*before.get("parts", []), part(facts, resumed.step if resumed else 0)]
    write_json(job.folder / MANIFEST, facts)


def _do_not_start_alike(of_ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """Which workers have not the first one's `code`, `weights` or `images`, as a line; empty where all have."""
    for name, problem in (
        ("code", "have another --model file than that"), ("weights", "do not start from the weights"),
        ("images", "have other images than those"),
    ):  # fmt: skip
        expected = next((its[name] for its in of_ranks.values()), "")
        if different := [rank for rank, its in of_ranks.items() if its[name] != expected]:
            return f"ranks {different} {problem} of rank {min(of_ranks)}"
    return ""
