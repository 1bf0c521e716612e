"""Checks of a run's configuration against the modes, models, optimizers, codecs and data sets.

`RunConfig` itself knows none of them. Everything here is quick, and imports no torch.
"""

import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import models
from hvdtrain.base import modes
from hvdtrain.base.config.command_line import config_options
from hvdtrain.base.config.file import read_config
from hvdtrain.base.config.run_config import DEVICES, LENGTHS, OPEN_WIRES, RunConfig, flag
from hvdtrain.base.config.untrusted import check_not_endless, is_url
from hvdtrain.base.errors import UsageError, unknown
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.numerics import compression, slowdown
from hvdtrain.base.numerics.optimizers import OPTIMIZERS, OUTER_OPTIMIZERS
from hvdtrain.base.system import trace
from hvdtrain.base.system.own_code import check_function, file_of, is_code, with_file
from hvdtrain.data import augment
from hvdtrain.runs.folder import CONFIG, name_one_of
from hvdtrain.runs.scripts import script_problems

# Options that may change when a run is resumed: how the work is shared out, how long it goes on,
# what is shown of it. All others decide what the weights become, and have to stay.
MAY_CHANGE = {
    "mode",
    "servers",
    "threads",
    "slow",
    "trace",
    "trace_steps",
    "device",
    "share_gpu",
    "compile",
    "push_scale",
    "look_ahead",
    "shares",
    "wait_for",
    "staleness",
    "backup",
    "delay_compensation",
    "staleness_lr",
    "compression",
    "wire",
    "ring_transport",
    "bucket_mb",
    "record",
    "accumulate",
    "epochs",
    "steps",
    "time_budget",
    "sprint",
    "repeat",
    "deterministic",
    "save",
    "target_accuracy",
    "target_loss",
    "stop_at_target",
    "snapshot_every",
    "keep_snapshots",
    "log_every",
    "timeout",
    "dataset",
    "skip_bad",
    "pretrained",  # its content is compared instead
}


def train_options(*without: str, **defaults: Any) -> Callable[[Callable], Callable]:
    """Returns a decorator that gives a command the options of a training job.

    Args:
        without: fields of RunConfig for which the command gets no option.
        defaults: other defaults, by field.
    """
    valid = {
        "model": models.name_lists(),
        "augment": augment.KINDS,
        "optimizer": OPTIMIZERS,
        "outer": OUTER_OPTIMIZERS,
        "compression": compression.names(),
    }
    return config_options(valid, *without, **defaults)


# Options for which each mode declares its choices, the default first, under the option's name.
CHOICES = ("shares", "wait_for")
IN_STEP = ("in step",)
# Options that decide how messages travel, and nothing that is computed.
_CARRYING = {"wire", "ring_transport", "bucket_mb", "record", "wait_for"}
# Patterns of secrets in a URL, with their names.
_SECRETS = [
    (r"://[^/@:]*:[^/@]*@", "a password"),
    (r"https?://[^/?#]*@", "a user or token"),
    (
        r"[?&]((x-(amz|goog)-)?signature|sig|(access_)?token|x-amz-security-token)=",
        "a token or signature",
    ),
]


def check(config: RunConfig) -> RunConfig:
    """Returns the configuration if it can be run at all.

    Raises:
        UsageError: a name is unknown (the message lists the valid ones), or values contradict each
            other.
    """
    _check_names(config)
    config.check_values()
    check_url(config.dataset)
    _check_own_code(config)
    problem = next(script_problems(config), "")
    if problem:
        raise UsageError(problem)
    mode = modes.declared(config.mode)
    problem = next(_mode_problems(config, mode), "")
    if problem:
        raise UsageError(problem)
    slowdown.parse(config.slow)
    _check_trace(config)
    _check_weights(config)
    if mode.has_servers and not config.servers:
        raise UsageError(f"--mode {config.mode} needs a server: add --servers 1 and one more rank")
    if config.servers and not mode.has_servers:
        raise UsageError(
            f"--mode {config.mode} has no servers: drop --servers, or choose a ps- mode"
        )
    return config


def _check_names(config: RunConfig) -> None:
    names = [
        ("mode", config.mode, modes.names()),
        ("optimizer", config.optimizer, list(OPTIMIZERS)),
        ("outer optimizer", config.outer, list(OUTER_OPTIMIZERS)),
        ("device", config.device, DEVICES),
        ("augmentation", config.augment, augment.KINDS),
    ]
    for noun, name, valid in names:
        if name not in valid:
            raise unknown(noun, name, valid)


def _check_own_code(config: RunConfig) -> None:
    """Checks that no option is given that a user's own model or data set ignores.

    Raises:
        UsageError: there is such an option.
    """
    ignored_by_model = {
        "--width": config.effective_width != 1,
        "--freeze": config.freeze != "none",
        "--dropout": config.dropout > 0,
    }
    ignored_by_data = {
        "--augment": config.augment != "none",
        "--image-size": config.image_size > 0,
        "--skip-bad": config.skip_bad,
    }
    if models.is_own(config.model):
        _refuse_given(ignored_by_model, config.model)
    if is_code(config.dataset):
        _refuse_given(ignored_by_data, config.dataset)


def _refuse_given(options: Mapping[str, bool], code: str) -> None:
    for option, is_given in options.items():
        if is_given:
            raise UsageError(f"{option} does nothing in {code}: its code decides that")


def _check_trace(config: RunConfig) -> None:
    trace.parse_steps(config.trace_steps)
    if config.trace_steps != RunConfig.trace_steps and not config.trace:
        raise UsageError(f"--trace-steps {config.trace_steps} is for --trace: add it")


def _check_weights(config: RunConfig) -> None:
    models.check(config.model, config.image_size, config.dropout, config.pretrained)
    if config.freeze == "features" and not config.pretrained:
        raise UsageError(
            "--freeze features trains the head on layers that have learned nothing: "
            "add --pretrained"
        )
    width = config.effective_width
    if config.pretrained == "imagenet" and width != 1:
        raise UsageError(
            f"--pretrained imagenet: nothing in it fits {config.model} at width {width}: "
            "add --width 1"
        )


def _mode_problems(config: RunConfig, mode: modes.Mode) -> Iterator[str]:
    """Yields messages about options that the mode or its servers cannot satisfy."""
    yield from _local_step_problems(config, mode)
    unused = _unused(config, mode)
    if unused:
        option = unused[0]
        users = [name for name in modes.names() if option in modes.declared(name).options]
        yield (f"{flag(option)} does nothing in --mode {config.mode}: it is for {', '.join(users)}")
    if config.staleness_lr and config.push_scale != "none":
        yield (
            f"--staleness-lr is for --push-scale none: in {config.push_scale} a push counts 1/N "
            "already, and its staleness is N - 1 on average"
        )
    if config.look_ahead != RunConfig.look_ahead and not config.can_look_ahead:
        yield (
            "--look-ahead is for --push-scale softsync without --delay-compensation and "
            "--local-steps: elsewhere workers are sent the weights as they are"
        )
    yield from _choice_problems(config, mode)
    if config.shares == "measured" and config.compile:
        yield "--shares measured is not for --compile, which compiles for each number of samples"
    codec, _ = compression.parse(config.compression)
    if not mode.can_send(codec):
        codecs = " or ".join(mode.compressions)
        yield (
            f"--compression {config.compression} is not for --mode {config.mode}, "
            f"which takes {codecs}"
        )


def _choice_problems(config: RunConfig, mode: modes.Mode) -> Iterator[str]:
    for name in CHOICES:
        value = getattr(config, name)
        if value in ("auto", *getattr(mode, name)):
            continue
        users = [other for other in modes.names() if value in getattr(modes.declared(other), name)]
        yield (
            f"{flag(name)} {value} is not for --mode {config.mode}: it is for {', '.join(users)}"
        )


def _local_step_problems(config: RunConfig, mode: modes.Mode) -> Iterator[str]:
    if not config.local_steps:
        return
    if mode.shards_optimizer:
        yield (
            f"--local-steps is not for --mode {mode.name}, where each rank has the optimizer's state "
            "of a part of the weights, and can step that alone: take allreduce"
        )
    if config.compression == "powersgd":
        yield (
            "--compression powersgd is not for --local-steps: torch's hook sends gradients, "
            "of each step"
        )
    if 0 < config.steps < config.local_steps and mode.lockstep:
        yield (
            f"--steps {config.steps} end before --local-steps {config.local_steps} do, "
            "and would exchange nothing"
        )
    if config.fragments > 1 and not mode.lockstep:
        yield (
            f"--fragments is for workers in lockstep: in --mode {config.mode} rounds end "
            "one worker after the other"
        )
    if config.record and mode.lockstep:
        yield (
            f"--record is not for --local-steps in --mode {config.mode}, where each run comes "
            "to the same weights"
        )


def check_url(dataset: str) -> None:
    """Checks the value of `--dataset`.

    Raises:
        UsageError: the value is too long, or is a URL with a secret, which files and logs would
            show.
    """
    check_not_endless("--dataset", dataset)
    if "://" not in dataset:
        return
    for pattern, secret in _SECRETS:
        if re.search(pattern, dataset, re.IGNORECASE):
            raise UsageError(
                f"--dataset has {secret} in its URL, which config.toml and command lines would "
                "show: leave it out, and set what the storage reads, such as "
                "AWS_SECRET_ACCESS_KEY; `launch --env NAME` hands that on"
            )


def check_functions(models: Collection[str], dataset: str) -> None:
    """Checks that files have the functions that options name. Their code is not run.

    Raises:
        UsageError: a function is not there. The message has the nearest name.
    """
    for model in models:
        check_function(model, "--model")
    check_function(dataset, "--dataset")


def check_workers(config: RunConfig, workers: int) -> None:
    """Checks that so many workers can run this: each needs a sample of every global batch.

    Raises:
        UsageError: they cannot.
    """
    most = modes.declared(config.mode).max_workers
    if most and workers > most:
        raise UsageError(f"--mode {config.mode} is one process, but {workers} were started")
    if config.backup >= workers:
        counted = with_noun(workers, "worker")
        raise UsageError(
            f"--backup {config.backup} needs more workers than that, and there are {counted}"
        )
    absent = [worker for worker in slowdown.slowed_workers(config.slow) if worker >= workers]
    if absent:
        raise UsageError(
            f"--slow {config.slow}: there is no worker {min(absent)}; "
            f"workers are 0 to {workers - 1}"
        )
    if config.script:  # which has batches of its own
        return
    if config.per_worker:
        raise ValueError("first resolve the configuration for_workers")
    batch = config.batch_size
    if batch // workers < config.accumulate > 1:
        raise UsageError(
            f"--accumulate {config.accumulate} passes of a global batch of {batch} leave some of "
            f"{workers} workers without a sample in a pass: "
            f"take --batch-size {workers * config.accumulate} or more"
        )
    if batch < workers:
        raise UsageError(
            f"a global batch of {batch} leaves {workers - batch} of {workers} workers without a "
            f"sample: take --batch-size {workers} or more, or at most {with_noun(batch, 'worker')}"
        )


def check_length(config: RunConfig, samples: int) -> None:
    """Checks that training is long enough for warm-up, a first round of local steps and tracing.

    Args:
        samples: the size of the training set.

    Raises:
        UsageError: it would be over before one of them.
    """
    total = config.total_steps(samples)
    if total is None:
        return
    if config.warmup >= total:
        raise UsageError(
            f"--warmup {config.warmup} is not shorter than the training, which has {total} steps"
        )
    if total < config.local_steps and modes.declared(config.mode).lockstep:
        raise UsageError(
            f"--local-steps {config.local_steps}: training has {total} steps, "
            "and would exchange nothing"
        )
    first_traced, _ = trace.parse_steps(config.trace_steps)
    if first_traced > total:
        raise UsageError(
            f"--trace-steps {config.trace_steps} would trace nothing: training has {total} steps"
        )


def for_mode(config: RunConfig, mode: str, servers: int) -> RunConfig:
    """Returns the configuration for another mode, without the options that the mode does not use.

    Args:
        servers: how many servers the mode gets if it has any.
    """
    declared = modes.declared(mode)
    other = dataclasses.replace(config, mode=mode, servers=servers if declared.has_servers else 0)
    defaults: dict[str, Any] = {name: getattr(RunConfig, name) for name in _unused(other, declared)}
    for name in CHOICES:
        if getattr(other, name) not in getattr(declared, name):
            defaults[name] = "auto"
    return dataclasses.replace(other, **defaults)


def choice(config: RunConfig, name: str) -> str:
    """Returns the effective value of one of the CHOICES; empty if the mode has no such choice."""
    if name == "wait_for" and config.local_steps:
        return "step"
    value: str = getattr(config, name)
    if value != "auto":
        return value
    choices: tuple[str, ...] = getattr(modes.declared(config.mode), name)
    return choices[0] if choices else ""


def mode_options(config: RunConfig) -> dict[str, Any]:
    """Returns the options of the mode and its messages that are not at their defaults, by name."""
    names = (*modes.declared(config.mode).options, "compression", *CHOICES)
    values = {name: getattr(config, name) for name in names}
    if config.script:
        values.pop("shares", None)  # they are equal in all modes, and cannot be chosen
    return {name: value for name, value in values.items() if value != getattr(RunConfig, name)}


def mathematics(mode: str, workers: int, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns a key that is the same for runs with steps that compute the same.

    The key is IN_STEP for all modes in lockstep that lose nothing in messages.
    Otherwise it consists of the mode, the number of workers and the options.

    Args:
        options: see mode_options.
    """
    is_lockstep = mode in modes.names() and modes.declared(mode).lockstep
    carrying = _CARRYING | {"shares"} if is_lockstep else _CARRYING
    computing = [(name, str(value)) for name, value in options.items() if name not in carrying]
    if is_lockstep and not computing:
        return IN_STEP
    return (mode, workers, *sorted(computing))


def check_joinable(config: RunConfig, option: str, is_elastic: bool) -> None:
    """Checks that workers can join such a job while it runs.

    Args:
        option: the option that needs it, for the message.
        is_elastic: whether a ring goes on without workers that are lost.

    Raises:
        UsageError: they cannot.
    """
    if config.script:
        raise UsageError(f"{option} is not for --script, whose samples nobody else can take over")
    mode = modes.declared(config.mode)
    if is_elastic and mode.elastic:
        return
    if not mode.survives_lost_worker or choice(config, "shares") != "leased":
        raise UsageError(
            f"{option} is for --mode ps-async and ps-ssp with leased shares, "
            "and for rings with --elastic"
        )
    if config.wire not in OPEN_WIRES:
        raise UsageError(
            f"{option} needs --wire zmq: torch's rpc takes no new rank once one that it knew "
            "is lost"
        )


def check_elastic(config: RunConfig) -> None:
    """Checks that a ring of this configuration can go on without a worker that is lost.

    Raises:
        UsageError: it cannot: see `launch --elastic`.
    """
    if config.script:
        raise UsageError("--elastic is not for --script: a step of a script is not taken again")
    able = [name for name in modes.names() if modes.declared(name).elastic]
    if config.mode not in able:
        raise UsageError(f"--elastic is for --mode {', '.join(able)}, not {config.mode}")
    if config.device == "cuda":
        raise UsageError(
            "--elastic is for CPUs, where Gloo carries the messages: give --device cpu"
        )
    if config.wait_for == "layer":
        raise UsageError(
            "--elastic is not for --wait-for layer: no weight changes before all workers have all "
            "averages"
        )
    if config.compression == "powersgd":
        raise UsageError(
            "--elastic is not for --compression powersgd: what a lost worker had left out would be "
            "lost"
        )
    if config.local_steps:
        raise UsageError(
            "--elastic is not for --local-steps: what a lost worker had come to since the last "
            "exchange would be lost"
        )
    if config.ring_transport == "mpi":
        raise UsageError(
            "--elastic is not for --ring-transport mpi: MPI ends with the first worker that is lost"
        )
    check_starts_again(config.mode)


def check_starts_again(mode: str) -> None:
    """Checks that Horovod can start a second time in this environment, if the mode needs Horovod.

    An elastic ring calls `hvd.init` for each group of workers. If both HOROVOD_FUSION_THRESHOLD and
    HOROVOD_CYCLE_TIME are set, the second call of Horovod 0.28.1 writes beyond an empty vector
    (`ParameterManager::BayesianParameter::SetValue`). An elastic ring that shards the optimizer
    sets the first one itself.

    Raises:
        UsageError: both are, or would be, set.
    """
    declared = modes.declared(mode)
    has_threshold = declared.shards_optimizer or "HOROVOD_FUSION_THRESHOLD" in os.environ
    if declared.joins_horovod and has_threshold and "HOROVOD_CYCLE_TIME" in os.environ:
        raise UsageError(
            "HOROVOD_CYCLE_TIME is set: with it and HOROVOD_FUSION_THRESHOLD, which --mode sharded "
            "sets itself, Horovod 0.28.1 crashes when a ring of --elastic starts again: unset it, "
            "or take --mode ddp"
        )


def _unused(config: RunConfig, mode: modes.Mode) -> list[str]:
    """Returns the options that are set although this mode does not use them."""
    unused = [name for name in modes.optional() if name not in mode.options]
    return [name for name in unused if getattr(config, name) != getattr(RunConfig, name)]


def resumed_options(file: Path, options: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Returns the options of a run that is resumed.

    Options on the command line win over those in the run's config.toml. The global batch and the
    learning rate of a run with --per-worker stay as they are. When the mode changes, options that
    the new mode does not use are dropped.

    Args:
        file: the run's config.toml.
        options: all options of the command.
        given: the names of the options that stand on the command line.
    """
    before = RunConfig(**read_config(file))
    if given & LENGTHS:  # lengths exclude each other, and the given one wins
        given = given | LENGTHS
    if options["per_worker"]:
        given = given - {"per_worker", "lr_scaling", "batch_size", "lr"}
    servers = options["servers"] if "servers" in given else before.servers
    mode = options["mode"] if "mode" in given else before.mode
    needs_other_mode = modes.declared(mode).has_servers != bool(servers)
    if "mode" not in given and "servers" in given and needs_other_mode:
        mode = options["mode"]  # the default for so many servers
    kept = dataclasses.asdict(for_mode(before, mode, servers))
    return kept | {name: options[name] for name in given - {"mode"}}


def fixed_options_changed(before: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Returns a phrase for each option that changed although a resumed run has to keep it.

    Args:
        before: the options until now; those that are missing have their defaults. A user's model
            is compared by its code, not by the path of its file.
    """
    before = dataclasses.asdict(RunConfig()) | dict(before)
    may_change = MAY_CHANGE
    if is_code(before["model"]) and is_code(config.model):
        may_change = MAY_CHANGE | {"model"}
    return [
        f"{flag(name)} was {before[name]!r}, not {value!r}"
        for name, value in dataclasses.asdict(config).items()
        if name not in may_change and before[name] != value
    ]


def another_job_error(folder: Path, changes: Sequence[str]) -> UsageError:
    return UsageError(
        f"{folder} is of another job: {'; '.join(changes)}; that may not change on --resume: "
        "leave it as it was, or train anew in another folder"
    )


def read_run_config(run: Path) -> RunConfig:
    """Returns the configuration of the job in a run folder.

    Raises:
        UsageError: the folder is no run folder, or its configuration cannot be run.
    """
    if not (run / CONFIG).is_file():
        raise UsageError(f"{run} is not a run folder: it has no {CONFIG}{name_one_of(run)}")
    return check(RunConfig(**read_config(run / CONFIG)))


def check_trusted(
    options: Mapping[str, Any], given: Collection[str], trusts: bool, where: Path
) -> None:
    """Checks that no code is imported, and no URL opened, that only a run folder names.

    Args:
        options: the job's `model` and `dataset`.
        given: which of them stand on the command line.
        trusts: whether --trust-model was given.
        where: the run folder, or its file.

    Raises:
        UsageError: the folder names code or a URL that the user has not named.
    """
    if trusts:
        return
    for name in ("model", "dataset", "script"):
        value = str(options.get(name, ""))
        if (is_code(value) or (name == "script" and value)) and name not in given:
            raise UsageError(
                f"{where} names code for {flag(name)}, {value}, which may be anybody's: "
                f"look at it, and give --trust-model, or {flag(name)} with your own"
            )
    url = str(options["dataset"])
    if is_url(url) and "dataset" not in given:
        raise UsageError(
            f"{where} names a URL for --dataset, {url}, which may be anybody's, and would be "
            f"opened as you: look at it, and give --dataset {shlex.quote(url)}, or --trust-model"
        )


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Returns the configuration with absolute paths, so that it means the same in any folder."""
    from hvdtrain.data.find import is_name  # imports what builds data sets

    dataset = config.dataset
    if not is_name(dataset) and not is_url(dataset):
        dataset = _absolute_code(dataset) if is_code(dataset) else _absolute(dataset)
    pretrained = config.pretrained
    if pretrained not in ("", "imagenet"):
        pretrained = _absolute(pretrained)
    model = _absolute_code(config.model)
    script = config.script and _absolute(config.script)
    return dataclasses.replace(
        config, dataset=dataset, model=model, pretrained=pretrained, script=script
    )


def _absolute(path: str) -> str:
    # Unlike Path.expanduser, this leaves the name of an unknown user as it is.
    return str(Path(os.path.expanduser(path)).absolute())


def _absolute_code(name: str) -> str:
    """Returns FILE.py:FUNCTION with the file's absolute path; other names as they are."""
    file = file_of(name)
    return with_file(name, file) if file else name
