"""Expands a launcher's recipe into the command that starts a job, and the job script or resource that it hands over."""

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.config import recipes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host

_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")  # ${NAME} is the shell's
# Variables that are passed on to ranks on other hosts. Others are not: they would show on command lines there.
FORWARDED = re.compile(
    r"(HVDTRAIN|HOROVOD|OMPI_MCA|OMP|MKL|NCCL|CUDA|GLOO|TP|TORCH|THP)_\w+|PYTHONPATH|LD_LIBRARY_PATH"
)
# Variables that the starter itself needs here.
STARTER_NEEDS = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "SSH_AUTH_SOCK", "TMPDIR", "KUBECONFIG", "HADOOP_CONF_DIR", "SLURM_CONF",
)  # fmt: skip


@dataclass(frozen=True)
class JobSpec:
    """A job to be started, independent of the launcher.

    Attributes:
        ranks: workers and servers together.
        program: the command line of each rank.
        hosts: each with the slots that the job uses; empty where the launcher finds hosts itself.
        out: the run folder.
        interface: the network interface by which the hosts reach each other, or empty.
        working_folder: where the ranks start; by default the current folder.
        survives_lost_rank: whether the other ranks go on when one dies.
        environment: variables for every rank, beside those of the recipe.
    """

    ranks: int
    program: Sequence[str]
    servers: int = 0
    hosts: Sequence[Host] = ()
    out: Path = Path("run")
    interface: str = ""
    working_folder: str = ""
    survives_lost_rank: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchCommand:
    """The command that starts a job, and what it needs.

    Attributes:
        argv: the command line.
        files: files to write first, by path: a host file, a job script.
        environment: the command's whole environment.
        stop_signal: the signal that the command passes on to the ranks, which then save and leave; None where it
            passes none on.
    """

    argv: list[str]
    files: dict[Path, str]
    environment: dict[str, str]
    stop_signal: signal.Signals | None = signal.SIGTERM

    def dry_run_text(self) -> str:
        """What `--dry-run` prints: the files and the command."""
        files = [f"# {path}\n{text.rstrip()}\n" for path, text in self.files.items()]
        return "\n".join([*files, shlex.join(self.argv)])


def expand(launcher: str, spec: JobSpec) -> LaunchCommand:
    """Fill in the launcher's recipe for a job.

    Raises:
        UsageError: the recipe needs hosts and there are none, or the other way round, or it has an unknown placeholder.
    """
    recipe = recipes.load("launchers", launcher)
    if recipe.get("hosts") == "needed" and not spec.hosts:
        raise UsageError(f"--launcher {launcher} needs hosts: give -H a:1,b:1 or --hostfile FILE")
    if spec.hosts and not re.search(r"\{(hosts|hostfile|nodelist)\}", str(recipe)):
        raise UsageError(f"--launcher {launcher} finds hosts itself: drop -H or --hostfile, or choose ssh or mpi")
    job_variables = dict(recipe.get("environment", {})) | dict(spec.environment)
    launch_folder = spec.out.with_name(f"{spec.out.name}.launch")
    environment = _starter_environment(job_variables, pass_all=recipe.get("hosts") != "needed")
    hostfile, script = launch_folder / "hosts", launch_folder / str(recipe.get("script_name", "job"))
    values: dict[str, Any] = {
        "bin": str(Path(sys.executable).parent), "prefix": str(Path(sys.executable).parent.parent),
        "ranks": str(spec.ranks), "workers": str(spec.ranks - spec.servers), "servers": str(spec.servers),
        "hosts": ",".join(f"{host.name}:{host.slots}" for host in spec.hosts),
        "nodes": str(len(spec.hosts)) if spec.hosts else "", "nodelist": ",".join(host.name for host in spec.hosts),
        "hostfile": str(hostfile) if spec.hosts else "", "script": str(script),
        "interface": spec.interface, "name": _job_name(spec.out.name), "out": str(spec.out),
        "folder": spec.working_folder or str(Path.cwd()),
        "program": list(spec.program), "program_json": json.dumps(list(spec.program)),
        "survive": list(recipe.get("survive", [])) if spec.survives_lost_rank else [],
        "exports": [
            word for key in sorted(environment) if key in job_variables or _is_forwarded(key) for word in ("-x", key)
        ],
    }  # fmt: skip
    argv = _fill_command(launcher, recipe["command"], values)
    files = {}
    if "{hostfile}" in str(recipe["command"]) and spec.hosts:
        files[hostfile] = "".join(f"{host.name} slots={host.slots}\n" for host in spec.hosts)
    if "script" in recipe:
        files[script] = _fill_script(launcher, recipe["script"], values)
    stop = recipe.get("leave", "SIGTERM")
    return LaunchCommand(argv, files, environment, None if stop == "file" else signal.Signals[stop])


def train_program(config: RunConfig, out: Path, all_options: bool = False) -> list[str]:
    """The command line of each rank of a training job.

    Args:
        all_options: name options that have their default values too. A run that is resumed takes options that are not
            named from its run folder.
    """
    return [sys.executable, "-m", "hvdtrain", "train", *config.to_args(all_options), "--out", str(out)]


def _job_name(run: str) -> str:
    """A name that every scheduler accepts for the job. Kubernetes has the strictest rule: RFC 1123's labels."""
    return f"hvdtrain-{re.sub(r'[^a-z0-9]+', '-', run.lower())}"[:63].rstrip("-")


def _starter_environment(job_variables: Mapping[str, str], pass_all: bool) -> dict[str, str]:
    """The starter's environment.

    Args:
        pass_all: pass this process's whole environment. Some starters write it into command lines on other hosts, where
            everybody could read the tokens in it.
    """
    if pass_all:
        return os.environ | dict(job_variables)
    passed = {key: value for key, value in os.environ.items() if key in STARTER_NEEDS or _is_forwarded(key)}
    return passed | dict(job_variables)


def _is_forwarded(key: str) -> bool:
    return bool(FORWARDED.fullmatch(key))


def _fill_command(launcher: str, template: Sequence[Any], values: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for word in template:
        if isinstance(word, list):  # such as ["--network-interfaces", "{interface}"]: left out if a value is empty
            if all(values.get(name) for inner in word for name in _PLACEHOLDER.findall(inner)):
                words += _fill_command(launcher, word, values)
        elif (match := _PLACEHOLDER.fullmatch(word)) and isinstance(values.get(match[1]), list):
            words += values[match[1]]
        else:
            words.append(_fill(launcher, word, values))
    return words


def _fill_script(launcher: str, template: str, values: Mapping[str, Any]) -> str:
    """Fill in a script; lines with an empty value are left out."""
    lines = [line for line in template.splitlines() if all(values.get(n, True) for n in _PLACEHOLDER.findall(line))]
    return _fill(launcher, "\n".join(lines), values) + "\n"


def _fill(launcher: str, text: str, values: Mapping[str, Any]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = ", ".join(values)
            raise UsageError(f"launchers/{launcher}.toml: there is no {match[0]} to fill in: choose from {known}")
        filled = values[match[1]]
        return shlex.join(filled) if isinstance(filled, list) else filled

    return _PLACEHOLDER.sub(value, text)
