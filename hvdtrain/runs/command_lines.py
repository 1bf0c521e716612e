"""Command lines that repeat runs: a comparison of several, or the training of one.

They are made from the runs' configurations, for `next` of an answer.
"""

import contextlib
import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from hvdtrain.base import modes
from hvdtrain.base.config.file import read_config
from hvdtrain.base.config.run_config import DEFAULT_EPOCHS, LENGTHS, RunConfig, flag, in_words
from hvdtrain.base.errors import UsageError
from hvdtrain.base.system.own_code import is_code
from hvdtrain.runs.folder import CONFIG
from hvdtrain.runs.launched import Launched, job_command
from hvdtrain.runs.read import Run
from hvdtrain.runs.request import CHOICES

# Fields that `compare` sets for each run.
_SET_BY_COMPARE = {"mode", "servers", "repeat", "seed", "threads", "sprint"}
# Fields that change what is recorded or when a rank is lost, and not what is compared.
_OF_RECORDING = {"snapshot_every", "keep_snapshots", "save", "log_every", "timeout"}
# Fields of a learning rate that `compare` has looked for.
_OF_FOUND_RATE = {"lr", "lr_around", "lr_trainings", "looked_for"}
# A longer comparison's runs take so many times as long.
LONGER = 4
PLACEHOLDERS = {
    "-H": "HOSTS",
    "--launcher": "LAUNCHER",
    "--sync-dst-dir": "DIR",
    "--network-interface": "NAME",
}
SPRINTS, TRAININGS = "sprints", "trainings"


def _config(run: Run) -> RunConfig:
    """Returns the run's configuration, or one of its mode alone if that cannot be read."""
    with contextlib.suppress(UsageError, OSError, TypeError, ValueError):
        return RunConfig(**read_config(run.folder / CONFIG))
    return RunConfig(mode=run.kind.mode, servers=run.kind.servers, snapshot_every="never")


def compare_command(
    runs: Sequence[Run],
    repeats: int,
    add: Iterable[str] = (),
    longer: str = "",
    trainings: int = 0,
    decide_by: str = "",
    threads: int = 0,
    given: Mapping[str, str] | None = None,
) -> str:
    """Returns the `hvdtrain compare` command that compares what these runs compared.

    Args:
        repeats: how many times each kind runs.
        add: modes that are to be compared too.
        longer: SPRINTS or TRAININGS: those take longer, in another folder. Without sprints all
            runs do.
        trainings: how many whole runs follow the sprints, if there are sprints; 0 for as many as
            there were.
        decide_by: --decide-by, if it is not the default.
        threads: --threads, if it was given; else 0.
        given: the options that say what is compared, as they were given; empty for an option that
            was not, so that the search of the comparison still chooses its value. None if they are
            not known: then they are the values of the runs.
    """
    configs = [_config(run) for run in runs]
    left_out = _SET_BY_COMPARE | LENGTHS
    words: list[str] = []
    if decide_by:
        words = ["--decide-by", decide_by]
        left_out.add("stop_at_target")
    if any(config.lr_around for config in configs):
        left_out |= _OF_FOUND_RATE  # the command looks for the rate, or finds it in its folder
        for config in configs:
            left_out.update(config.looked_for.split(","))
    elif decide_by and not configs[0].script:
        words += ["--lr", f"{configs[0].lr:g}"]  # or else it would look for the rate
        left_out.add("lr")
    if given is None:
        words += _sizes(runs, add)
    else:
        left_out |= given.keys()
        words += _given_words(given, runs, add)
    words += _place([run for run in runs if not run.kind.one_machine])
    words += _lengths(runs, configs, longer, trainings)
    for field in dataclasses.fields(RunConfig):
        if field.name not in left_out:
            words += _option(field, runs, configs)
    if threads:
        words += ["--threads", str(threads)]
    seed = configs[0].seed - runs[0].manifest.repeat + 1
    if seed > 0:
        words += ["--seed", str(seed)]
    words += _out(runs, longer)
    return shlex.join(["hvdtrain", "compare", *words, "--repeats", str(repeats)])


def can_be_continued(runs: Sequence[Run]) -> bool:
    """Returns whether `compare` of this version adds runs to the folder of these runs."""
    return all(run.manifest.hvdtrain == version("hvdtrain") for run in runs)


def _out(runs: Sequence[Run], longer: str) -> list[str]:
    """Returns the option for the folder of the comparison; another one if all runs are made anew."""
    runs_folder = runs[0].folder.parent
    comparison = runs_folder.parent
    if runs_folder.name != "runs" or not (comparison / "logs").is_dir():
        return []
    suffix = ""
    if longer:
        suffix = "-longer"
    elif not can_be_continued(runs):
        suffix = f"-{version('hvdtrain')}"
    return ["--out", f"{comparison}{suffix}"]


def _sizes(runs: Sequence[Run], add: Iterable[str]) -> list[str]:
    """Returns the options for modes and for the numbers of workers and servers."""
    kinds = [run.kind for run in runs]
    workers = sorted({kind.workers for kind in kinds if kind.is_distributed})
    servers = sorted({kind.servers for kind in kinds if kind.servers})
    words = ["--modes", _mode_names(runs, add)]
    if workers:
        words += ["--workers", ",".join(map(str, workers))]
    if servers:
        words += ["--servers", ",".join(map(str, servers))]
    return words


def _mode_names(runs: Sequence[Run], add: Iterable[str]) -> str:
    """Returns the value of --modes that names the modes of the runs, and those to add."""
    kinds = [run.kind for run in runs]
    # Beside one process `compare` adds rings on one host, which stand for one machine.
    named = [kind.mode for kind in kinds if not kind.one_machine]
    machines = ["single"] if any(kind.one_machine for kind in kinds) else []
    return ",".join(dict.fromkeys([*named, *machines, *add]))


def _given_words(given: Mapping[str, str], runs: Sequence[Run], add: Iterable[str]) -> list[str]:
    """Returns the options that say what is compared, as they were given.

    Modes that are to join need --modes. If that was not given, it has the modes of the runs.
    """
    added = list(add)
    named = dict(given)
    if added and given.get("modes"):
        named["modes"] = ",".join([given["modes"], *added])
    elif added:
        named["modes"] = _mode_names(runs, added)
    words = []
    for name, value in named.items():
        if value:
            words += [flag(name), value]
    return words


def _option(
    field: "dataclasses.Field[Any]", runs: Sequence[Run], configs: Sequence[RunConfig]
) -> list[str]:
    """Returns the option of `compare` with its values; empty if all have the default."""
    values = _values(field, runs, configs)
    if field.name == "wire":  # `compare` takes all wires unless one is named
        return [flag("wire"), *values] if len(values) == 1 else []
    usual = "never" if field.name == "snapshot_every" else field.default
    if set(values) <= {usual}:
        return []
    if isinstance(usual, bool):
        return [flag(field.name) if True in values else f"--no-{flag(field.name)[2:]}"]
    if field.name in _OF_RECORDING:  # `compare` takes one value
        values = values[:1]
    return [flag(field.name), ",".join(str(in_words(field, value)) for value in values)]


def _values(
    field: "dataclasses.Field[Any]", runs: Sequence[Run], configs: Sequence[RunConfig]
) -> list[Any]:
    """Returns the field's values, each once, in runs of modes that use it."""
    name = field.name
    if name in CHOICES:
        # A mode that supports none of the chosen values runs with its default beside them.
        chosen = {getattr(config, name) for config in configs} - {field.default}
        users = {mode for mode in modes.names() if chosen & {*getattr(modes.declared(mode), name)}}
        used = [config for config in configs if config.mode in users]
    else:
        users = {mode for mode in modes.names() if name in modes.declared(mode).options}
        used = [
            config
            for run, config in zip(runs, configs, strict=True)
            if not users or run.kind.mode in users
        ]
    return list(dict.fromkeys(getattr(config, name) for config in used))


def _lengths(
    runs: Sequence[Run], configs: Sequence[RunConfig], longer: str, trainings: int
) -> list[str]:
    """Returns the options for the length of runs and, with sprints, for the number of trainings."""
    sprint = max((run.manifest.sprint for run in runs), default=0.0)
    trained = [run for run in runs if not run.manifest.sprint]
    trained_configs = [
        config for run, config in zip(runs, configs, strict=True) if not run.manifest.sprint
    ]
    words = []
    if trained_configs:
        are_longer = longer == TRAININGS or (bool(longer) and not sprint)
        words = _training_length(trained_configs[0], are_longer, bool(sprint))
    if not sprint:
        return words
    sprint_s = sprint * LONGER if longer == SPRINTS else sprint
    of_sprints = ["--sprint", f"{sprint_s:g}"]
    if not trained and not trainings and not configs[0].script:
        return [*of_sprints, "--trainings", "0"]  # speed alone was measured
    trainings = trainings or max((run.manifest.repeat for run in trained), default=1)
    if words or trainings > 1:
        words += ["--trainings", str(trainings)]
    return [*of_sprints, *words]


def _training_length(config: RunConfig, is_longer: bool, after_sprints: bool) -> list[str]:
    """Returns the option for the length of trainings; after sprints, only if it is no default."""
    times = LONGER if is_longer else 1
    if config.time_budget:
        return ["--time-budget", f"{config.time_budget * times:g}s"]
    if config.steps:
        return ["--steps", str(config.steps * times)]
    if config.script:  # it has a length of its own
        return []
    if config.epochs or is_longer or not after_sprints:
        return ["--epochs", str((config.epochs or DEFAULT_EPOCHS) * times)]
    return []


def _place(runs: Sequence[Run]) -> list[str]:
    """Returns the options for launcher and hosts, each with the most ranks that a run had there."""
    launches = [run.manifest.launch for run in runs if run.manifest.launch]
    slots: dict[str, int] = {}
    for launch in launches:
        for host in launch.hosts:
            name, _, count = host.partition(":")
            slots[name] = max(slots.get(name, 0), int(count) if count.isdecimal() else 1)
    launchers = [launch.launcher for launch in launches if launch.hosts and launch.launcher]
    launcher = launchers[0] if launchers else "local"
    hosts = tuple(f"{name}:{count}" for name, count in slots.items())
    return Launched(launcher, hosts).place_options()


def with_placeholders(command: str) -> str:
    """Returns a command of this module with placeholders for places, code and URLs.

    Run folders may be anybody's, and the command is there to be pasted: it must not run a
    stranger's code, open their URL, or go to their hosts.
    """
    words = shlex.split(command)
    for at, option in enumerate(words[:-1]):
        value = words[at + 1]
        if option in ("--model", "--dataset"):
            words[at + 1] = ",".join(map(_placeholder, value.split(",")))
        elif option == "--script":
            words[at + 1] = "FILE.py"
        elif option in PLACEHOLDERS:
            words[at + 1] = PLACEHOLDERS[option]
    return shlex.join(words)


def _placeholder(value: str) -> str:
    if "://" in value:
        return "URL"
    return "FILE.py:FUNCTION" if is_code(value) else value


def longer_command(run: Run, steps: int) -> str:
    """Returns the command that trains as this run did, for so many steps."""
    lengths = {name: getattr(RunConfig, name) for name in LENGTHS}
    return run_command(run, **lengths | {"steps": steps})


def run_command(run: Run, **changed: Any) -> str:
    """Returns the command that trains as this run did, without what a comparison sets.

    Args:
        changed: options with other values.
    """
    set_by_compare = (
        "repeat",
        "threads",
        "seed",
        "snapshot_every",
        "sprint",
        "lr_around",
        "lr_trainings",
        "looked_for",
    )
    defaults = {name: getattr(RunConfig, name) for name in set_by_compare}
    config = dataclasses.replace(_config(run), **defaults | changed)
    launched = run.manifest.launch or Launched("local")
    return shlex.join(job_command(config, run.kind.workers, launched))
