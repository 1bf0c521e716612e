"""The commands that `next` of an answer names: a comparison of such runs, or one of them alone.

They are made of what the runs were asked to do.
"""

import contextlib
import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain import modes
from hvdtrain.config.file import read_config
from hvdtrain.config.run_config import DEFAULT_EPOCHS, LENGTHS, RunConfig, flag, in_words
from hvdtrain.errors import UsageError
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.launched import Launched, job_command
from hvdtrain.runs.read import Run
from hvdtrain.runs.request import CHOICES

_DECIDED = {"mode", "servers", "repeat", "seed", "threads", "sprint"}  # by `compare`, for each run
LONGER = 4  # times
SPRINTS, TRAININGS = "sprints", "trainings"


def _asked(run: Run) -> RunConfig:
    """What the run was asked to do; where that cannot be read, its mode alone."""
    with contextlib.suppress(UsageError, OSError, TypeError, ValueError):
        return RunConfig(**read_config(run.folder / CONFIG))
    return RunConfig(mode=run.kind.mode, servers=run.kind.servers, snapshot_every="never")


def compare_command(
    runs: Sequence[Run], repeats: int, add: Iterable[str] = (), longer: str = "", trainings: int = 0
) -> str:
    """The comparison of these runs with so many repeats, and with so many trainings where there are sprints.

    Args:
        add: modes that are to be compared too.
        longer: SPRINTS or TRAININGS: these take longer then, in another folder; all runs do where there are no sprints.
    """
    configs = [_asked(run) for run in runs]
    options = {
        "--modes": dict.fromkeys([*(run.kind.mode for run in runs), *add]),
        "--workers": sorted({run.kind.workers for run in runs if run.kind.is_distributed}),
        "--servers": sorted({run.kind.servers for run in runs if run.kind.servers}),
    }
    words = [word for name, values in options.items() if values for word in (name, ",".join(map(str, values)))]
    words += _place(runs) + _lengths(runs, configs, longer, trainings)
    for field in dataclasses.fields(RunConfig):
        if field.name not in _DECIDED | LENGTHS:
            words += _option(field, runs, configs)
    seed = configs[0].seed - runs[0].manifest.repeat + 1
    words += ["--seed", str(seed)] if seed > 0 else []
    inner = runs[0].folder.parent
    if inner.name == "runs" and (inner.parent / "logs").is_dir():  # of a comparison's folder
        words += ["--out", f"{inner.parent}-longer" if longer else str(inner.parent)]
    return shlex.join(["hvdtrain", "compare", *words, "--repeats", str(repeats)])


def _option(field: "dataclasses.Field[Any]", runs: Sequence[Run], configs: Sequence[RunConfig]) -> list[str]:
    """The option as `compare` is given it, with its value or values; nothing where all is as by default."""
    users = {name for name in modes.names() if field.name in modes.declared(name).options}
    values = dict.fromkeys(
        getattr(config, field.name)
        for run, config in zip(runs, configs, strict=True)
        if not users or run.kind.mode in users
    )
    if field.name in CHOICES:  # a mode that can have none of the values asked for has it as it is by default
        asked = values.keys() - {field.default}
        able = [name for name in modes.names() if asked & {*getattr(modes.declared(name), field.name)}]
        values = dict.fromkeys(getattr(config, field.name) for config in configs if config.mode in able)
    usual = "never" if field.name == "snapshot_every" else field.default
    if field.name == "wire":  # `compare` takes all of them where none is named
        return [flag("wire"), *values] if len(values) == 1 else []
    if set(values) <= {usual}:
        return []
    if isinstance(usual, bool):
        return [flag(field.name) if True in values else f"--no-{flag(field.name)[2:]}"]
    return [flag(field.name), ",".join(str(in_words(field, value)) for value in values)]


def _lengths(runs: Sequence[Run], configs: Sequence[RunConfig], longer: str, trainings: int) -> list[str]:
    """How long runs are. Where there are sprints, how long trainings are is said if that is not the default."""
    sprint = max((run.manifest.sprint for run in runs), default=0.0)
    whole = [(run, config) for run, config in zip(runs, configs, strict=True) if not run.manifest.sprint]
    is_longer = longer == TRAININGS or bool(longer and not sprint)
    times, words = LONGER if is_longer else 1, []
    if whole:
        _, config = whole[0]
        if config.time_budget:
            words = ["--time-budget", f"{config.time_budget * times:g}s"]
        elif config.steps:
            words = ["--steps", str(config.steps * times)]
        elif config.epochs or is_longer or not sprint:
            words = ["--epochs", str((config.epochs or DEFAULT_EPOCHS) * times)]
    if not sprint:
        return words
    trainings = trainings or max((run.manifest.repeat for run, _ in whole), default=1)
    words += ["--trainings", str(trainings)] if words or trainings > 1 else []
    return ["--sprint", f"{sprint * (LONGER if longer == SPRINTS else 1):g}", *words]


def _place(runs: Sequence[Run]) -> list[str]:
    """Where: each host with the most ranks that any run had there."""
    launches = [run.manifest.launch for run in runs if run.manifest.launch]
    slots: dict[str, int] = {}
    for host in (host for launch in launches for host in launch.hosts):
        name, _, count = host.partition(":")
        slots[name] = max(slots.get(name, 0), int(count) if count.isdecimal() else 1)
    launcher = next((launch.launcher for launch in launches if launch.hosts and launch.launcher), "local")
    return Launched(launcher, tuple(f"{name}:{count}" for name, count in slots.items())).place_options()


def run_command(run: Run) -> str:
    """What trains as this run did, without what a comparison decides."""
    decided = {name: getattr(RunConfig, name) for name in ("repeat", "threads", "seed", "snapshot_every", "sprint")}
    config = dataclasses.replace(_asked(run), **decided)
    return shlex.join(job_command(config, run.kind.workers, run.manifest.launch or Launched("local")))
