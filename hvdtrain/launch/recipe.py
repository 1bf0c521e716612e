"""Expands a launcher's recipe: the command that starts a job, and the job script or resource that it hands over."""

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

from hvdtrain import recipes
from hvdtrain.config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host

_VARIABLE = re.compile(r"(?<!\$)\{([a-z_]+)\}")  # ${NAME} is the shell's
# What ranks on other hosts may know of this process's environment. All of it would show on command lines there.
PASSED = re.compile(r"(HVDTRAIN|HOROVOD|OMPI_MCA|OMP|MKL|NCCL|CUDA|GLOO|TP|TORCH|THP)_\w+|PYTHONPATH|LD_LIBRARY_PATH")
NEEDED_HERE = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "SSH_AUTH_SOCK", "TMPDIR", "KUBECONFIG", "HADOOP_CONF_DIR")


@dataclass(frozen=True)
class Job:
    """What is to be started.

    Attributes:
        ranks: workers and servers together.
        program: what each rank runs, a word an item.
        hosts: with the slots that the job takes there; empty where the launcher finds hosts itself.
        out: the run folder.
        interface: the network interface that the hosts reach each other by, or empty.
        folder: where the ranks start; by default here.
        survives: whether the other ranks are to live when one dies.
        environment: variables for every rank, beside those of the recipe.
    """

    ranks: int
    program: Sequence[str]
    servers: int = 0
    hosts: Sequence[Host] = ()
    out: Path = Path("run")
    interface: str = ""
    folder: str = ""
    survives: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """How it is started.

    Attributes:
        words: the command.
        files: what it reads, by path: a host file, a job script.
        environment: all of its environment.
        leave: the signal that it passes on to the ranks, which then save and leave; None where it passes on none.
    """

    words: list[str]
    files: dict[Path, str]
    environment: dict[str, str]
    leave: signal.Signals | None = signal.SIGTERM

    def shown(self) -> str:
        """What `--dry-run` prints: the files, and the command."""
        files = [f"# {path}\n{text.rstrip()}\n" for path, text in self.files.items()]
        return "\n".join([*files, shlex.join(self.words)])


def expand(launcher: str, job: Job) -> Start:
    """The recipe filled in. UsageError where it needs hosts and there are none, or the other way round, or names
    a variable that there is not."""
    recipe = recipes.load("launchers", launcher)
    if recipe.get("hosts") == "needed" and not job.hosts:
        raise UsageError(f"--launcher {launcher} needs hosts: give -H a:1,b:1 or --hostfile FILE")
    if job.hosts and not re.search(r"\{(hosts|hostfile|nodelist)\}", str(recipe)):
        raise UsageError(f"--launcher {launcher} finds hosts itself: drop -H or --hostfile, or choose ssh or mpi")
    here = dict(recipe.get("environment", {})) | dict(job.environment)
    base = job.out.with_name(f"{job.out.name}.launch")
    environment = _environment(here, everything=not job.hosts)
    hostfile, script = base / "hosts", base / str(recipe.get("script_name", "job"))
    values: dict[str, Any] = {
        "bin": str(Path(sys.executable).parent), "prefix": str(Path(sys.executable).parent.parent),
        "ranks": str(job.ranks), "workers": str(job.ranks - job.servers), "servers": str(job.servers),
        "hosts": ",".join(f"{host.name}:{host.slots}" for host in job.hosts),
        "nodes": str(len(job.hosts)) if job.hosts else "", "nodelist": ",".join(host.name for host in job.hosts),
        "hostfile": str(hostfile) if job.hosts else "", "script": str(script),
        "interface": job.interface, "name": _name(job.out.name), "out": str(job.out),
        "folder": job.folder or str(Path.cwd()),
        "program": list(job.program), "program_json": json.dumps(list(job.program)),
        "survive": list(recipe.get("survive", [])) if job.survives else [],
        "exports": [word for key in sorted(environment) if key in here or _is_passed(key) for word in ("-x", key)],
    }  # fmt: skip
    words = _words(launcher, recipe["command"], values)
    files = {}
    if "{hostfile}" in str(recipe["command"]) and job.hosts:
        files[hostfile] = "".join(f"{host.name} slots={host.slots}\n" for host in job.hosts)
    if "script" in recipe:
        files[script] = _text(launcher, recipe["script"], values)
    leave = recipe.get("leave", "SIGTERM")
    return Start(words, files, environment, None if leave == "file" else signal.Signals[leave])


def train_program(config: RunConfig, out: Path, whole: bool = False) -> list[str]:
    """What each rank of a training job runs.

    Args:
        whole: name options that are as they are by default too: those of a run in the folder would win otherwise.
    """
    return [sys.executable, "-m", "hvdtrain", "train", *config.to_args(whole), "--out", str(out)]


def _name(run: str) -> str:
    """A job's name that every scheduler takes: Kubernetes' rule, RFC 1123's labels, is the narrowest."""
    return f"hvdtrain-{re.sub(r'[^a-z0-9]+', '-', run.lower())}"[:63].rstrip("-")


def _environment(own: Mapping[str, str], everything: bool) -> dict[str, str]:
    """The starter's environment. Some starters put all of it on the command lines of other hosts, tokens too."""
    if everything:
        return os.environ | dict(own)
    passed = {key: value for key, value in os.environ.items() if key in NEEDED_HERE or _is_passed(key)}
    return passed | dict(own)


def _is_passed(key: str) -> bool:
    return bool(PASSED.fullmatch(key))


def _words(launcher: str, template: Sequence[Any], values: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for word in template:
        if isinstance(word, list):  # words that go together: left out where one of their values is empty
            if all(values.get(name) for part in word for name in _VARIABLE.findall(part)):
                words += _words(launcher, word, values)
        elif (whole := _VARIABLE.fullmatch(word)) and isinstance(values.get(whole[1]), list):
            words += values[whole[1]]
        else:
            words.append(_filled(launcher, word, values))
    return words


def _text(launcher: str, template: str, values: Mapping[str, Any]) -> str:
    """A script, without the lines of which a value is empty."""
    lines = [line for line in template.splitlines() if all(values.get(n, True) for n in _VARIABLE.findall(line))]
    return _filled(launcher, "\n".join(lines), values) + "\n"


def _filled(launcher: str, text: str, values: Mapping[str, Any]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = ", ".join(values)
            raise UsageError(f"launchers/{launcher}.toml: there is no {match[0]} to fill in: choose from {known}")
        found = values[match[1]]
        return shlex.join(found) if isinstance(found, list) else found

    return _VARIABLE.sub(value, text)
