"""The hosts of a job: options and files that name them, how many ranks each gets, and how commands run there."""

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvdtrain.config import recipes
from hvdtrain.config.recipes import Launcher
from hvdtrain.config.untrusted import read_whole
from hvdtrain.errors import UsageError
from hvdtrain.world.network import own_addresses, resolve

# Host names go into command lines, not all of which are quoted: nothing that a shell would interpret is allowed.
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9._-]*@)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_LINE = re.compile(r"([^\s:]+)(?::(\S*)|\s+slots=(\S+))?(?:\s+max[_-]slots=\S+)?")  # of a host file
MAX_SLOTS = 4096
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]


@dataclass(frozen=True)
class Host:
    """A machine, `name` or `user@name`, and how many ranks it takes: of those given, workers at least."""

    name: str
    slots: int

    def __str__(self) -> str:
        """As -H takes it."""
        return f"{self.name}:{self.slots}"


def host_options(command: Callable) -> Callable:
    """Decorator: adds -H and --hostfile to a command."""
    command = click.option(
        "--hostfile", type=click.Path(path_type=Path), metavar="FILE",
        help="Hosts from a file: `name slots=2` or `name:2` a line, or a line for each slot.",
    )(command)  # fmt: skip
    return click.option(
        "--hosts",
        "-H",
        metavar="A:1,B:1",
        help="Hosts, each with how many workers it takes; servers go to what is left, or beside them. Or a host file.",
    )(command)


class Recipe(click.ParamType):
    """A launcher's recipe, by its name or its file.

    Args:
        waits: its command has to end with the job.
    """

    name = "name|file"

    def __init__(self, waits: bool = False) -> None:
        self.waits = waits

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Launcher:
        recipe = value if isinstance(value, Launcher) else recipes.launcher(value)
        if self.waits and recipe.script_name:
            raise UsageError(f"--launcher {recipe.name} hands jobs over to a scheduler: take one that waits for them")
        return recipe


def launcher_option(command: Callable) -> Callable:
    """Decorator: adds --launcher to a command that runs here, or with -H on hosts; see allocation.hosts_or_here."""
    return click.option(
        "--launcher", type=Recipe(waits=True), default="ssh", show_default=True,
        help="With -H or --hostfile: how ranks are started there, by ssh, mpi, or a recipe's file. `srun` inside a "
        "Slurm allocation, and `mpi` in the launcher pod of a Kubernetes MPIJob, find the hosts themselves.",
    )(command)  # fmt: skip


def recipe_of_job(command: Callable) -> Callable:
    """Decorator: adds --launcher to a command about a job that was launched."""
    return click.option(
        "--launcher", type=Recipe(), help="Its recipe again, where that is a file outside launchers/."
    )(command)  # fmt: skip


def secrets_option(command: Callable) -> Callable:
    """Decorator: adds --env to a command that starts ranks; it gets `secrets`, the variables with their values."""
    return click.option(
        "--env", "secrets", multiple=True, metavar="NAME", callback=_with_values,
        help="Give ranks this variable of the environment, such as AWS_SECRET_ACCESS_KEY or HTTPS_PROXY: those that "
        "name libraries' settings they have anyway. No command line shows it. Can be repeated.",
    )(command)  # fmt: skip


def _with_values(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> dict[str, str]:
    if unset := [name for name in names if name not in os.environ or not re.fullmatch(r"[A-Za-z_]\w*", name)]:
        raise UsageError(f"--env {unset[0]}: there is no variable of this name here")
    return {name: os.environ[name] for name in names}


def given_hosts(hosts: str | None, hostfile: Path | None) -> list[Host]:
    """The hosts of -H, which may name a host file too, or --hostfile; none where neither is given."""
    if hosts and hostfile:
        raise UsageError("-H and --hostfile exclude each other: give one")
    if hosts and os.path.isfile(hosts):  # Path.is_file would raise where a list of hosts is too long for a name
        hostfile = Path(hosts)
    return parse_hostfile(hostfile) if hostfile else parse_hosts(hosts) if hosts else []


def parse_hosts(text: str) -> list[Host]:
    """Hosts from `a:1,b:2`. UsageError where a name or a number is invalid, or a host is named twice."""
    hosts = [_host(*word.strip().partition(":")[::2], where=f"-H {text}") for word in text.split(",")]
    names = [host.name for host in hosts]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"host {', '.join(sorted(twice))} is named twice: give each once, with its slots")
    return hosts


def parse_hostfile(path: Path) -> list[Host]:
    """Hosts from a file, one a line: `name`, `name:2` (MPICH) or `name slots=2` (OpenMPI, Horovod).

    Comments (#), blank lines and OpenMPI's `max_slots=4` are ignored. The lines of a host are added up: PBS writes one
    for each slot.

    Raises:
        UsageError: the file or a line cannot be read; it names the file and the line.
    """
    try:
        lines = read_whole(path).decode().splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"--hostfile {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    slots_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not (match := _LINE.fullmatch(text)):
            raise UsageError(f"{path}, line {number}: '{text}' is not understood; write `name slots=2` or `name:2`")
        host = _host(match[1], match[2] or match[3] or "", where=f"{path}, line {number}")
        slots_of[host.name] = slots_of.get(host.name, 0) + host.slots
    if not slots_of:
        raise UsageError(f"{path} names no host")
    return [Host(name, slots) for name, slots in slots_of.items()]


def _host(name: str, slots: str, where: str) -> Host:
    if len(name) > 253 or not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name!a} is not the name of a host")
    if slots and not (slots.isascii() and slots.isdigit() and 1 <= int(slots) <= MAX_SLOTS):
        raise UsageError(f"{where}: {slots!a} is not a number of slots from 1 to {MAX_SLOTS}")
    return Host(name, int(slots or 1))


def allocate(hosts: Sequence[Host], workers: int, servers: int = 0) -> list[Host]:
    """The hosts that a job uses, each with as many slots as it gets ranks.

    Slots are for workers. Servers take those that are left over, and where none are go beside workers, to one host
    after the other: so `a:1,b:1` is enough for two workers in every mode. Ranks are dealt out in rounds, one to each
    host that has a free slot, so that servers, the first ranks, are spread.

    Raises:
        UsageError: there are too few slots for the workers.
    """
    ranks, slots = workers + servers, sum(host.slots for host in hosts)
    if slots < workers:
        available = " + ".join(f"{host.slots} on {host.name}" for host in hosts)
        raise UsageError(
            f"{workers} workers need {workers} slots, and there are {available}: name more hosts, or more slots"
        )
    beside = max(0, ranks - slots)
    hosts = [Host(host.name, host.slots + len(range(i, beside, len(hosts)))) for i, host in enumerate(hosts)]
    used = hosts_of_ranks(hosts)[:ranks]
    return [Host(host.name, used.count(host.name)) for host in hosts if host.name in used]


def hosts_of_ranks(hosts: Sequence[Host]) -> list[str]:
    """The host of each rank, with ranks dealt out in rounds, one to each host that has a slot left."""
    return [host.name for turn in range(max(host.slots for host in hosts)) for host in hosts if turn < host.slots]


def rank_of_process(slots: Sequence[int], process: int) -> int:
    """The rank of a process that horovodrun has numbered, host by host: ranks are dealt out in rounds, as above.

    Args:
        slots: the ranks on each host.
    """
    places = [(turn, host) for host, count in enumerate(slots) for turn in range(count)]
    return sorted(places).index(places[process])


def command_on(host: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command on a host; the command is quoted for the shell there."""
    return ["sh", "-c", shlex.join(command)] if is_local(host) else [*SSH, host, shlex.join(command)]


def in_folder(folder: str, command: Sequence[str]) -> list[str]:
    """The command, run in a folder; it fails where there is none."""
    return ["sh", "-c", 'cd "$0" && exec "$@"', folder, *command]


def code_path(copied: str) -> str:
    """PYTHONPATH where Python is started, which imports nothing of the current folder: the folder that --sync-dst-dir
    has copied the code to, if any, and what the user has in it.
    """
    return os.pathsep.join(filter(None, [copied, os.environ.get("PYTHONPATH", "")]))


def is_local(host: str) -> bool:
    """Whether the name is this machine's: mpirun and horovodrun use no ssh for it either."""
    address = resolve(host)
    return address.startswith("127.") or address in own_addresses()
