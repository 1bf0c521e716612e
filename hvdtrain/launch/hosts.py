"""The hosts of a job: how they are named, how many ranks each gets, and how commands run there."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from hvdtrain.base.config import recipes
from hvdtrain.base.config.untrusted import LARGEST_DOCUMENT, MOST_RANKS, read_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.base.world.network import own_addresses, resolve

# Host names go into command lines, some of them unquoted. Therefore they may have no character that
# a shell interprets.
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9._-]*@)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_LINE = re.compile(r"([^\s:]+)(?::(\S*)|\s+slots=(\S+))?(?:\s+max[_-]slots=\S+)?")  # of a host file
MAX_SLOTS = MOST_RANKS  # of one host
MOST_SLOTS = 2**16  # of all hosts together
RECIPE_OF_JOB = click.option(
    "--launcher",
    type=recipes.launcher,
    metavar="NAME|FILE",
    help="The job's recipe again, if it is a file outside launchers/.",
)
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]


@dataclass(frozen=True)
class Host:
    """A machine, `name` or `user@name`, and its number of slots.

    Each slot takes a worker. Servers may come on top: see allocate.
    """

    name: str
    slots: int

    def __str__(self) -> str:
        """Returns the host in the form of -H."""
        return f"{self.name}:{self.slots}"


def host_options(command: Callable) -> Callable:
    """Decorates a command with -H and --hostfile."""
    command = click.option(
        "--hostfile",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Hosts from a file: `name slots=2` or `name:2` a line, or a line for each slot.",
    )(command)
    return click.option(
        "--hosts",
        "-H",
        metavar="A:1,B:1",
        help="Hosts, each with the number of workers that it takes, or a host file. Servers go to "
        "slots that are left, else beside workers. Ports and users of ssh go into ~/.ssh/config.",
    )(command)


def launcher_option(command: Callable) -> Callable:
    """Decorates a command that runs here, or with -H on hosts, with --launcher.

    See allocation.hosts_or_here.
    """
    return click.option(
        "--launcher",
        type=recipes.launcher,
        metavar="NAME|FILE",
        default="ssh",
        show_default=True,
        help="With -H or --hostfile: how ranks are started there, by ssh, mpi, or a recipe's "
        "file. `srun` inside a Slurm allocation, and `mpi` in the launcher pod of a Kubernetes "
        "MPIJob, find the hosts themselves.",
    )(command)


def secrets_option(command: Callable) -> Callable:
    """Decorates a command that starts ranks with --env.

    The command gets `secrets`, the variables with their values.
    """
    return click.option(
        "--env",
        "secrets",
        multiple=True,
        metavar="NAME",
        callback=_with_values,
        help="Give ranks this variable of the environment, such as AWS_SECRET_ACCESS_KEY or "
        "HTTPS_PROXY. Variables that set libraries' options are given to ranks anyway. No command "
        "line shows the value. Can be repeated.",
    )(command)


def _with_values(
    ctx: click.Context, param: click.Parameter, names: tuple[str, ...]
) -> dict[str, str]:
    for name in names:
        if name not in os.environ or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UsageError(f"--env {name}: there is no variable of this name here")
    return {name: os.environ[name] for name in names}


def given_hosts(hosts: str | None, hostfile: Path | None) -> list[Host]:
    """Returns the hosts of -H or --hostfile; none if neither is given.

    Args:
        hosts: the value of -H, which may also name a host file.

    Raises:
        UsageError: the hosts are not understood, or -H is empty, as a variable of the shell that is
            not set.
    """
    if hosts is not None and not hosts.strip():
        raise UsageError("-H names no host: give hosts, or leave -H out")
    if hosts and hostfile:
        raise UsageError("-H and --hostfile exclude each other: give one")
    # Path.is_file would raise if a list of hosts is too long for a file's name.
    if hosts and os.path.isfile(hosts):
        hostfile = Path(hosts)
    if hostfile:
        return parse_hostfile(hostfile)
    return parse_hosts(hosts) if hosts else []


def parse_hosts(text: str) -> list[Host]:
    """Returns the hosts of `a:1,b:2`.

    Raises:
        UsageError: a name or a number is invalid, or a host is named twice.
    """
    hosts = []
    for word in text.split(","):
        _refuse_other_forms(word.strip(), f"-H {text}")
        name, _, slots = word.strip().partition(":")
        hosts.append(_host(name, slots, where=f"-H {text}"))
    times = Counter(host.name for host in hosts)
    repeated = sorted(name for name, count in times.items() if count > 1)
    if repeated:
        raise UsageError(
            f"host {', '.join(repeated)} is named twice: give each once, with its slots"
        )
    return _checked(hosts, f"-H {text}")


def parse_hostfile(path: Path) -> list[Host]:
    """Returns the hosts in a file.

    A line is `name`, `name:2` (MPICH) or `name slots=2` (OpenMPI, Horovod). Comments (#), blank
    lines and OpenMPI's `max_slots=4` are ignored. The slots of a host's lines add up: PBS writes a
    line for each slot.

    Raises:
        UsageError: the file or a line cannot be read. The message names the file and the line.
    """
    try:
        lines = read_whole(path, LARGEST_DOCUMENT).decode().splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--hostfile {path} cannot be read: {getattr(error, 'strerror', error)}"
        ) from None
    slots_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        _refuse_other_forms(text.split()[0], f"{path}, line {number}")
        match = _LINE.fullmatch(text)
        if not match:
            raise UsageError(
                f"{path}, line {number}: '{text}' is not understood; write `name slots=2` or "
                "`name:2`"
            )
        host = _host(match[1], match[2] or match[3] or "", where=f"{path}, line {number}")
        slots_of[host.name] = slots_of.get(host.name, 0) + host.slots
    if not slots_of:
        raise UsageError(f"{path} names no host")
    return _checked([Host(name, slots) for name, slots in slots_of.items()], str(path))


def _checked(hosts: list[Host], where: str) -> list[Host]:
    """Returns the hosts.

    Raises:
        UsageError: they have more slots than any job has ranks.
    """
    total = sum(host.slots for host in hosts)
    if total > MOST_SLOTS:
        raise UsageError(
            f"{where[:200]} has {total:,} slots, more than {MOST_SLOTS:,}: name those that are "
            "needed"
        )
    return hosts


def _refuse_other_forms(word: str, where: str) -> None:
    """Checks that a host is not named as other tools have it: by IPv6, or with a port.

    Raises:
        UsageError: it is. The message says where such things go.
    """
    where = where[:200]
    is_ipv6 = word.startswith("[") or re.fullmatch(
        r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*", word
    )
    if is_ipv6 and "." not in word.partition(":")[0]:
        raise UsageError(
            f"{where}: {word[:60]} is an IPv6 address, which neither horovodrun nor mpirun takes in "
            "a list of hosts: give the host a name (DNS, /etc/hosts), and name:slots here"
        )
    name, *numbers = word.split(":")
    is_port = len(numbers) == 1 and re.fullmatch("[0-9]{4,5}", numbers[0])
    if len(numbers) == 2 or (is_port and MAX_SLOTS < int(numbers[0]) < 2**16):
        raise UsageError(
            f"{where}: {':'.join(numbers)[:60]!a} is not a number of slots: a host is name:slots. A "
            f"port of ssh goes into ~/.ssh/config (`Port {numbers[0][:9]}` under `Host {name[:60]}`), "
            "and a job chooses its own ports"
        )


def _host(name: str, slots: str, where: str) -> Host:
    if len(name) > 253 or not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name!a} is not the name of a host")
    if slots and not (re.fullmatch("[0-9]{1,4}", slots) and 1 <= int(slots) <= MAX_SLOTS):
        raise UsageError(f"{where}: {slots!a} is not a number of slots from 1 to {MAX_SLOTS}")
    return Host(name, int(slots or 1))


def allocate(hosts: Sequence[Host], workers: int, servers: int = 0) -> list[Host]:
    """Returns the hosts that a job uses, each with as many slots as it gets ranks.

    Slots are for workers. Servers take slots that are left over. If there are none, they go beside
    workers, to one host after the other, so that `a:1,b:1` is enough for two workers in every mode.
    Slots are taken in rounds, one of each host that has a free one, so that a job with fewer ranks
    than slots uses as many hosts as it can.

    Raises:
        UsageError: there are too few slots for the workers.
    """
    ranks = workers + servers
    slots = sum(host.slots for host in hosts)
    if slots < workers:
        available = " + ".join(f"{host.slots} on {host.name}" for host in hosts)
        raise UsageError(
            f"{workers} workers need {workers} slots, and there are {available}: name more hosts, "
            "or more slots"
        )
    extra = max(0, ranks - slots)
    with_extra = []
    for i, host in enumerate(hosts):
        own_extra = len(range(i, extra, len(hosts)))
        with_extra.append(Host(host.name, host.slots + own_extra))
    slots_of = Counter(_in_rounds(with_extra)[:ranks])
    return [Host(host.name, slots_of[host.name]) for host in hosts if slots_of[host.name]]


def hosts_of_ranks(hosts: Sequence[Host], servers: int) -> list[str]:
    """Returns the host of each rank.

    Without servers the ranks of a host follow each other. In a ring neighbouring ranks are
    neighbours, so that it crosses the network once for each host, whatever the number of workers
    there. With servers ranks are dealt out in rounds, one to each host that has a slot left, so
    that the servers, which have the first ranks, are on as many hosts as possible.
    """
    if servers:
        return _in_rounds(hosts)
    names: list[str] = []
    for host in hosts:
        names += [host.name] * host.slots
    return names


def _in_rounds(hosts: Sequence[Host]) -> list[str]:
    names: list[str] = []
    for turn in range(max(host.slots for host in hosts)):
        names += [host.name for host in hosts if turn < host.slots]
    return names


def rank_of_process(slots: Sequence[int], process: int) -> int:
    """Returns the rank of a process by horovodrun's number, in a job with servers.

    horovodrun numbers processes host by host, while ranks are dealt out in rounds: see
    hosts_of_ranks.

    Args:
        slots: the ranks on each host.
        process: horovodrun's number.
    """
    places: list[tuple[int, int]] = []
    for host, count in enumerate(slots):
        places += [(turn, host) for turn in range(count)]
    return sorted(places).index(places[process])


def command_on(host: str, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command, quoted for the shell there, on a host."""
    quoted = shlex.join(command)
    return ["sh", "-c", quoted] if is_local(host) else [*SSH, host, quoted]


def in_folder(folder: str, command: Sequence[str]) -> list[str]:
    """Returns a command that runs the command in a folder, and fails if there is no such folder."""
    return ["sh", "-c", 'cd "$0" && exec "$@"', folder, *command]


def code_path(copied: str) -> str:
    """Returns PYTHONPATH for ranks, where Python imports nothing of the current folder.

    Args:
        copied: the folder to which --sync-dst-dir has copied the code, or empty. It comes before
            the folders in this process's PYTHONPATH.
    """
    return os.pathsep.join(filter(None, [copied, os.environ.get("PYTHONPATH", "")]))


def is_local(host: str) -> bool:
    """Returns whether the name is this machine's. Then mpirun and horovodrun use no ssh either."""
    address = resolve(host)
    return address.startswith("127.") or address in own_addresses()
