"""What a run is asked to do, checked against what there is: modes, models, optimizers, codecs, data sets.

The configuration itself knows none of them. Everything here is quick, and imports no torch.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import models, modes
from hvdtrain.config.command_line import config_options
from hvdtrain.config.file import read_config
from hvdtrain.config.run_config import DEVICES, LENGTHS, OPEN_WIRES, RunConfig, flag
from hvdtrain.data import augment
from hvdtrain.errors import UsageError, unknown
from hvdtrain.formatting import with_noun
from hvdtrain.numerics import compression, slowdown
from hvdtrain.numerics.optimizers import OPTIMIZERS
from hvdtrain.runs.folder import CONFIG, name_one_of
from hvdtrain.system import trace
from hvdtrain.system.own_code import file_of, is_code, with_file

# What may change on the way: how the work is shared out, how long it goes on, what is shown of it. All else decides
# what the weights become, and has to stay.
MAY_CHANGE = {
    "mode", "servers", "threads", "slow", "trace", "trace_steps", "device", "share_gpu", "compile",
    "push_scale", "look_ahead", "shares", "wait_for", "staleness", "backup", "delay_compensation", "staleness_lr",
    "compression", "wire", "ring_transport", "bucket_mb", "record", "accumulate", "epochs", "steps", "time_budget",
    "sprint", "repeat",
    "deterministic", "save", "target_accuracy", "stop_at_target", "snapshot_every", "keep_snapshots", "log_every",
    "timeout", "dataset", "skip_bad", "pretrained",  # what is compared by its content
}  # fmt: skip


def train_options(*without: str, **defaults: Any) -> Callable[[Callable], Callable]:
    """Decorator: the options of a training job, but for some, and some with other defaults."""
    valid = {
        "model": models.name_lists(), "augment": augment.KINDS, "optimizer": OPTIMIZERS,
        "compression": compression.NAMES,
    }  # fmt: skip
    return config_options(valid, *without, **defaults)


# Options of which each mode declares what it can do, the default first, under the option's name.
CHOICES = ("shares", "wait_for")
IN_STEP = ("in step",)
# Of how messages travel: nothing computed hangs on it.
_CARRYING = {"wire", "ring_transport", "bucket_mb", "record", "wait_for"}
# Patterns of secrets in a URL, and what they are.
_SECRETS = [
    (r"://[^/@]*:[^/@]*@", "a password"),
    (r"https?://[^/?#]*@", "a user or token"),
    (r"://.*[?&]((x-(amz|goog)-)?signature|sig|(access_)?token|x-amz-security-token)=", "a token or signature"),
]


def check(config: RunConfig) -> RunConfig:
    """The configuration, if it can be run at all.

    Raises:
        UsageError: an unknown name (the valid ones are listed) or values that contradict each other.
    """
    for what, name, valid in [
        ("mode", config.mode, modes.names()),
        ("optimizer", config.optimizer, list(OPTIMIZERS)),
        ("device", config.device, DEVICES),
        ("augmentation", config.augment, augment.KINDS),
    ]:
        if name not in valid:
            raise unknown(what, name, valid)
    config.check_values()
    check_url(config.dataset)
    _check_own_code(config)
    mode = modes.declared(config.mode)
    if problem := next(_mode_problems(config, mode), ""):
        raise UsageError(problem)
    slowdown.parse(config.slow)
    trace.parse_steps(config.trace_steps)
    if config.trace_steps != RunConfig.trace_steps and not config.trace:
        raise UsageError(f"--trace-steps {config.trace_steps} is for --trace: add it")
    models.check(config.model, config.image_size, config.dropout, config.pretrained)
    if config.freeze == "features" and not config.pretrained:
        raise UsageError("--freeze features trains the head on layers that have learned nothing: add --pretrained")
    if config.pretrained == "imagenet" and config.taken_width != 1:
        raise UsageError(
            f"--pretrained imagenet: nothing in it fits {config.model} at width {config.taken_width}: add --width 1"
        )
    if mode.has_servers and not config.servers:
        raise UsageError(f"--mode {config.mode} needs a server: add --servers 1 and one more rank")
    if config.servers and not mode.has_servers:
        raise UsageError(f"--mode {config.mode} has no servers: drop --servers, or choose a ps- mode")
    return config


def _check_own_code(config: RunConfig) -> None:
    """UsageError for options that a user's own model or data has no use for."""
    useless = {
        "--width": (config.model, config.taken_width != 1), "--freeze": (config.model, config.freeze != "none"),
        "--dropout": (config.model, config.dropout > 0), "--augment": (config.dataset, config.augment != "none"),
        "--image-size": (config.dataset, config.image_size > 0), "--skip-bad": (config.dataset, config.skip_bad),
    }  # fmt: skip
    for option, (name, is_given) in useless.items():
        if is_given and (models.is_own(name) if name == config.model else is_code(name)):
            raise UsageError(f"{option} does nothing in {name}: its code decides that")


def _mode_problems(config: RunConfig, mode: modes.Mode) -> Iterator[str]:
    """What is asked of the mode, or of its servers, that it does not do."""
    yield from _local_step_problems(config, mode)
    if unused := _unused(config, mode):
        users = ", ".join(name for name in modes.names() if unused[0] in modes.declared(name).options)
        yield f"{flag(unused[0])} does nothing in --mode {config.mode}: it is for {users}"
    if config.staleness_lr and config.push_scale != "none":
        yield (
            f"--staleness-lr is for --push-scale none: in {config.push_scale} a push counts 1/N already, and its "
            "staleness is N - 1 on average"
        )
    if config.look_ahead != RunConfig.look_ahead and not config.can_look_ahead:
        yield (
            "--look-ahead is for --push-scale softsync without --delay-compensation and --local-steps: elsewhere "
            "workers are sent the weights as they are"
        )
    for name in CHOICES:
        if (value := getattr(config, name)) not in ("auto", *getattr(mode, name)):
            users = ", ".join(other for other in modes.names() if value in getattr(modes.declared(other), name))
            yield f"{flag(name)} {value} is not for --mode {config.mode}: it is for {users}"
    if config.shares == "measured" and config.compile:
        yield "--shares measured is not for --compile, which compiles for each number of samples"
    if not mode.can_send(compression.parse(config.compression)[0]):
        takes = " or ".join(mode.compressions)
        yield f"--compression {config.compression} is not for --mode {config.mode}, which takes {takes}"


def _local_step_problems(config: RunConfig, mode: modes.Mode) -> Iterator[str]:
    if not config.local_steps:
        return
    if config.mode == "sharded":
        yield (
            "--local-steps is not for --mode sharded, where each rank has the optimizer's state of a part of the "
            "weights, and can step that alone: take allreduce"
        )
    if config.compression == "powersgd":
        yield "--compression powersgd is not for --local-steps: torch's hook sends gradients, of each step"
    if 0 < config.steps < config.local_steps and mode.lockstep:
        yield f"--steps {config.steps} end before --local-steps {config.local_steps} do, and would exchange nothing"
    if config.fragments > 1 and not mode.lockstep:
        yield f"--fragments is for workers in lockstep: in --mode {config.mode} rounds end one worker after the other"
    if config.record and mode.lockstep:
        yield f"--record is not for --local-steps in --mode {config.mode}, where each run comes to the same weights"


def check_url(dataset: str) -> None:
    """UsageError where `--dataset` is a URL with a secret in it: files, folders' names and logs would tell it."""
    if secret := next((what for pattern, what in _SECRETS if re.search(pattern, dataset, re.IGNORECASE)), ""):
        raise UsageError(
            f"--dataset has {secret} in its URL, which config.toml and command lines would show: leave it out, and "
            "set what the storage reads, such as AWS_SECRET_ACCESS_KEY; `launch --env NAME` hands that on"
        )


def check_workers(config: RunConfig, workers: int) -> None:
    """UsageError where so many workers cannot run this: each needs a sample of every global batch."""
    most = modes.declared(config.mode).max_workers
    if most and workers > most:
        raise UsageError(f"--mode {config.mode} is one process, but {workers} were started")
    if config.backup >= workers:
        raise UsageError(f"--backup {config.backup} leaves no push of {with_noun(workers, 'worker')} to wait for")
    if absent := sorted(worker for worker in slowdown.slowed_workers(config.slow) if worker >= workers):
        raise UsageError(f"--slow {config.slow}: there is no worker {absent[0]}; workers are 0 to {workers - 1}")
    if config.per_worker:
        raise ValueError("first resolve the configuration for_workers")
    if config.batch_size // workers < config.accumulate > 1:
        raise UsageError(
            f"--accumulate {config.accumulate} passes of a global batch of {config.batch_size} leave some of {workers} "
            f"workers without a sample in a pass: take --batch-size {workers * config.accumulate} or more"
        )
    if config.batch_size < workers:
        raise UsageError(
            f"a global batch of {config.batch_size} leaves {workers - config.batch_size} of {workers} workers without "
            f"a sample: take --batch-size {workers} or more, or at most {with_noun(config.batch_size, 'worker')}"
        )


def check_length(config: RunConfig, samples: int) -> None:
    """UsageError where training on so many samples would be over before the warm-up is, or a first round of local
    steps, or before a step is traced.
    """
    total, (first, _) = config.total_steps(samples), trace.parse_steps(config.trace_steps)
    if total is not None and config.warmup >= total:
        raise UsageError(f"--warmup {config.warmup} is not over before training is, which has {total} steps")
    if total is not None and total < config.local_steps and modes.declared(config.mode).lockstep:
        raise UsageError(f"--local-steps {config.local_steps}: training has {total} steps, and would exchange nothing")
    if total is not None and first > total:
        raise UsageError(f"--trace-steps {config.trace_steps} would trace nothing: training has {total} steps")


def for_mode(config: RunConfig, mode: str, servers: int) -> RunConfig:
    """The same for another mode, without the options that it does not use; `servers` if it has any."""
    declared = modes.declared(mode)
    other = dataclasses.replace(config, mode=mode, servers=servers if declared.has_servers else 0)
    defaults: dict[str, Any] = {name: getattr(RunConfig, name) for name in _unused(other, declared)}
    defaults |= {name: "auto" for name in CHOICES if getattr(other, name) not in getattr(declared, name)}
    return dataclasses.replace(other, **defaults)


def choice(config: RunConfig, name: str) -> str:
    """Which of the CHOICES of that name is taken; empty where the mode has none."""
    value: str = getattr(config, name)
    if name == "wait_for" and config.local_steps:
        return "step"
    return next(iter(getattr(modes.declared(config.mode), name)), "") if value == "auto" else value


def mode_options(config: RunConfig) -> dict[str, Any]:
    """What is asked of how the mode works and of what it sends, where it is not the default, by option."""
    names = (*modes.declared(config.mode).options, "compression", *CHOICES)
    return {name: value for name in names if (value := getattr(config, name)) != getattr(RunConfig, name)}


def mathematics(mode: str, workers: int, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a step computes: the same, IN_STEP, of all that work in lockstep and lose nothing in messages; else the
    mode, its workers and its options.

    Args:
        options: see mode_options.
    """
    is_lockstep = mode in modes.names() and modes.declared(mode).lockstep
    carrying = _CARRYING | ({"shares"} if is_lockstep else set())
    computing = sorted((name, str(value)) for name, value in options.items() if name not in carrying)
    return IN_STEP if is_lockstep and not computing else (mode, workers, *computing)


def check_joinable(config: RunConfig, option: str, is_elastic: bool) -> None:
    """UsageError where workers cannot join such a job while it runs.

    Args:
        option: which asks for it.
        is_elastic: a ring goes on without workers that are lost.
    """
    if is_elastic and modes.declared(config.mode).elastic:
        return
    if not modes.declared(config.mode).survives_lost_worker or choice(config, "shares") != "leased":
        raise UsageError(f"{option} is for --mode ps-async and ps-ssp with leased shares, and for rings with --elastic")
    if config.wire not in OPEN_WIRES:
        raise UsageError(f"{option} needs --wire zmq: torch's rpc takes no new rank once one that it knew is lost")


def check_elastic(config: RunConfig) -> None:
    """UsageError where a ring cannot go on without a worker that is lost: see `launch --elastic`."""
    able = [name for name in modes.names() if modes.declared(name).elastic]
    problems = {
        f"--elastic is for --mode {', '.join(able)}, not {config.mode}": config.mode not in able,
        "--elastic is for CPUs, where Gloo carries the messages: give --device cpu": config.device == "cuda",
        "--elastic is not for --wait-for layer: no weight changes before all workers have all averages":
            config.wait_for == "layer",
        "--elastic is not for --compression powersgd: what a lost worker had left out would be lost":
            config.compression == "powersgd",
        "--elastic is not for --local-steps: what a lost worker had come to since the last exchange would be lost":
            bool(config.local_steps),
        "--elastic is not for --ring-transport mpi: MPI ends with the first worker that is lost":
            config.ring_transport == "mpi",
    }  # fmt: skip
    if problem := next((problem for problem, holds in problems.items() if holds), ""):
        raise UsageError(problem)


def _unused(config: RunConfig, mode: modes.Mode) -> list[str]:
    """Options that were set and that this mode does not use, though others do."""
    optional = dict.fromkeys(option for name in modes.names() for option in modes.declared(name).options)
    return [name for name in optional if getattr(config, name) != getattr(RunConfig, name) and name not in mode.options]


def resumed_options(file: Path, options: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """The options of a run that goes on: those given, and for the others what its config.toml has.

    Its global batch and learning rate stay, also where they are given as each worker's. What its mode alone has a use
    for gives way to another mode.
    """
    before = RunConfig(**read_config(file))
    if given & LENGTHS:  # they exclude each other, and the one given here wins
        given = given | LENGTHS
    if options["per_worker"]:
        given = given - {"per_worker", "lr_scaling", "batch_size", "lr"}
    mode = options["mode"] if "mode" in given else before.mode
    servers = options["servers"] if "servers" in given else before.servers
    if "mode" not in given and "servers" in given and modes.declared(mode).has_servers != bool(servers):
        mode = options["mode"]  # what so many servers mean by default
    kept = for_mode(before, mode, servers)
    return dataclasses.asdict(kept) | {name: options[name] for name in given - {"mode"}}


def changed_for_good(before: Mapping[str, Any], config: RunConfig) -> list[str]:
    """What may not change when a run goes on, and did, a phrase each.

    Args:
        before: what it lacks has its default. A user's model is compared by its code, and not by where that lies.
    """
    before = dataclasses.asdict(RunConfig()) | dict(before)
    may_change = MAY_CHANGE | ({"model"} if is_code(before["model"]) and is_code(config.model) else set())
    return [
        f"{flag(name)} was {before[name]!r}, not {value!r}"
        for name, value in dataclasses.asdict(config).items()
        if name not in may_change and before[name] != value
    ]


def of_another_job(folder: Path, different: Sequence[str]) -> UsageError:
    return UsageError(
        f"{folder} is of another job: {'; '.join(different)}; that may not change on --resume: leave it as it was, "
        "or train anew in another folder"
    )


def config_of(run: Path) -> RunConfig:
    """What a run folder's job was asked to do. UsageError where it is no run folder, or cannot be run like this."""
    if not (run / CONFIG).is_file():
        raise UsageError(f"{run} is not a run folder: it has no {CONFIG}{name_one_of(run)}")
    return check(RunConfig(**read_config(run / CONFIG)))


def check_trusted(options: Mapping[str, Any], given: Collection[str], trusts: bool, where: Path) -> None:
    """UsageError where code would be imported that a run folder names, and that nobody has named here.

    Args:
        options: `model` and `dataset`, as they are to be.
        given: those options that stand on the command line.
        trusts: whether --trust-model does.
        where: the run folder, or its file.
    """
    for name in ("model", "dataset"):
        if is_code(value := str(options[name])) and name not in given and not trusts:
            raise UsageError(
                f"{where} names code for {flag(name)}, {value}, which may be anybody's: look at it, and give "
                f"--trust-model, or {flag(name)} with your own"
            )


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same with absolute paths, so that it means the same from any folder."""

    from hvdtrain.data.find import is_name, is_url  # with what builds data sets

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    def code(name: str) -> str:
        return with_file(name, file) if (file := file_of(name)) else name

    known = is_name(config.dataset) or is_url(config.dataset)
    own = is_code(config.dataset)
    return dataclasses.replace(
        config, dataset=config.dataset if known else code(config.dataset) if own else absolute(config.dataset),
        model=code(config.model),
        pretrained=config.pretrained if config.pretrained in ("", "imagenet") else absolute(config.pretrained),
    )  # fmt: skip
