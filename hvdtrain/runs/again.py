"""The commands that do such runs again, from what they were asked to do: a comparison of them, or one alone."""

import contextlib
import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import modes
from hvdtrain.config.file import read_config
from hvdtrain.config.run_config import DEFAULT_EPOCHS, LENGTHS, RunConfig, flag, in_words
from hvdtrain.errors import UsageError
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.launched import Launched, launch_command
from hvdtrain.runs.read import Run

_DECIDED = {"mode", "servers", "repeat", "seed", "threads", "sprint"}  # by `compare`, for each run
_ALWAYS = {"wire"}  # `compare` takes all of them where none is named
LONGER = 4  # times
SPRINTS, TRAININGS = "sprints", "trainings"


def config_of(run: Run) -> RunConfig:
    """What the run was asked to do; where that cannot be read, its mode alone."""
    with contextlib.suppress(UsageError, OSError, TypeError, ValueError):
        return RunConfig(**read_config(run.folder / CONFIG))
    return RunConfig(mode=run.kind.mode, servers=run.kind.servers, snapshot_every="never")


def comparison(runs: Sequence[Run]) -> Path | None:
    """The folder that `compare` was given as --out; None where the runs come from elsewhere."""
    inner = runs[0].folder.parent
    return inner.parent if inner.name == "runs" else None


def compare_command(
    runs: Sequence[Run], repeats: int, add: Iterable[str] = (), longer: str = "", trainings: int = 0
) -> str:
    """The comparison of these runs with so many repeats, and with so many trainings where these are beside sprints.

    Args:
        add: modes that are to be compared too.
        longer: SPRINTS or TRAININGS: these take longer then, in another folder; all runs do where there are no sprints.
    """
    configs = [config_of(run) for run in runs]
    words = ["hvdtrain", "compare", "--modes", ",".join(dict.fromkeys([*(run.kind.mode for run in runs), *add]))]
    sizes = sorted({run.kind.workers for run in runs if run.kind.is_distributed})
    servers = sorted({run.kind.servers for run in runs if run.kind.servers})
    words += ["--workers", _joined(sizes)] if sizes else []
    words += ["--servers", _joined(servers)] if servers else []
    words += _place(runs)
    options = _lengths(runs, configs, longer, trainings)
    for field in dataclasses.fields(RunConfig):
        if field.name not in _DECIDED | LENGTHS:
            options |= _option(field, runs, configs)
    seed = configs[0].seed - runs[0].repeat + 1
    options |= {"--seed": str(seed)} if seed > 0 else {}
    folder = comparison(runs)
    if folder:
        options |= {"--out": f"{folder}-longer" if longer else str(folder)}
    return shlex.join([*words, *(word for pair in options.items() for word in pair if word), "--repeats", str(repeats)])


def _joined(values: Iterable[Any]) -> str:
    return ",".join(map(str, values))


def _option(field: "dataclasses.Field[Any]", runs: Sequence[Run], configs: Sequence[RunConfig]) -> dict[str, str]:
    """The option as `compare` is given it, with its value or values; nothing where all is as by default."""
    using = {name for name in modes.names() if field.name in modes.declared(name).options}
    own = [config for run, config in zip(runs, configs, strict=True) if not using or run.kind.mode in using]
    values = dict.fromkeys(getattr(config, field.name) for config in own)
    usual = "never" if field.name == "snapshot_every" else field.default
    if not values or (set(values) == {usual} and field.name not in _ALWAYS):
        return {}
    if field.name in _ALWAYS and len(values) > 1:
        return {}
    if isinstance(usual, bool):
        return {flag(field.name) if True in values else f"--no-{flag(field.name)[2:]}": ""}
    return {flag(field.name): _joined(in_words(field, value) for value in values)}


def _lengths(
    runs: Sequence[Run], configs: Sequence[RunConfig], longer: str, trainings: int
) -> dict[str, str]:  # fmt: skip
    """How long runs are. Beside sprints, how long trainings are is said where that is not the default."""
    sprint = max((run.manifest.sprint for run in runs), default=0.0)
    options = {"--sprint": f"{sprint * (LONGER if longer == SPRINTS else 1):g}"} if sprint else {}
    is_longer = longer == TRAININGS or bool(longer and not sprint)
    trained = [(run, config) for run, config in zip(runs, configs, strict=True) if not run.manifest.sprint]
    if trained:
        _, config = trained[0]
        if not sprint or is_longer or config.steps or config.epochs or config.time_budget:
            options |= _length(config, LONGER if is_longer else 1)
    trainings = trainings or max((run.repeat for run, _ in trained), default=1)
    return options | ({"--trainings": str(trainings)} if sprint and (trainings > 1 or len(options) > 1) else {})


def _length(config: RunConfig, times: int) -> dict[str, str]:
    if config.time_budget:
        return {"--time-budget": f"{config.time_budget * times:g}s"}
    if config.steps:
        return {"--steps": str(config.steps * times)}
    return {"--epochs": str((config.epochs or DEFAULT_EPOCHS) * times)}


def _place(runs: Sequence[Run]) -> list[str]:
    """Where: each host with the most ranks that any run had there."""
    slots: dict[str, int] = {}
    launched = [found for run in runs if (found := run.manifest.launch)]
    for host in (host for own in launched for host in own.hosts):
        name, _, count = host.partition(":")
        slots[name] = max(slots.get(name, 0), int(count) if count.isdecimal() else 1)
    launcher = next((own.launcher for own in launched if own.hosts and own.launcher), "local")
    return Launched(launcher, tuple(f"{name}:{count}" for name, count in slots.items())).place_options()


def launch_line(run: Run) -> str:
    """What trains as this run did, without what a comparison decides."""
    found = config_of(run)
    decided = [name for name in ("repeat", "threads", "seed", "snapshot_every", "sprint") if hasattr(found, name)]
    config = dataclasses.replace(found, **{name: getattr(RunConfig, name) for name in decided})
    if run.kind.family == modes.ONE_MACHINE:
        return shlex.join(["hvdtrain", "train", *config.to_args()])
    how = run.manifest.launch
    launched = Launched(how.launcher or "local", tuple(how.hosts), how.interface or "") if how else Launched("local")
    words = launch_command(config, run.kind.workers, launched, "")
    at = words.index("--out")
    return shlex.join([*words[:at], *words[at + 2 :]])
