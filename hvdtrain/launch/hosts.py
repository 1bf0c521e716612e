"""The hosts of a job: named on the command line or in a file of any of the usual forms, and which rank goes where."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError

# What a host may be called: names go into command lines, some of them quoted by nobody.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
MOST_SLOTS = 4096


@dataclass(frozen=True)
class Host:
    """A machine, and how many ranks it takes."""

    name: str
    slots: int


def parse(text: str) -> list[Host]:
    """Hosts from `a:1,b:2`. UsageError where a name or number is none, or a host comes twice."""
    return _checked([_host(*word.strip().partition(":")[::2], where=f"-H {text}") for word in text.split(",")])


def parse_file(path: Path) -> list[Host]:
    """Hosts from a file: a host a line as `name`, `name:2` (MPICH), `name slots=2` (OpenMPI, Horovod).

    Comments (#) and blank lines are passed over, and so is what else OpenMPI may say (`max_slots=4`).

    Raises:
        UsageError: with file and line, where one cannot be read.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"--hostfile {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, _, slots = words[0].partition(":")
        for word in words[1:]:
            key, is_given, value = word.partition("=")
            if key == "slots" and is_given and not slots:
                slots = value
            elif key not in ("max_slots", "max-slots") or not is_given:
                raise UsageError(f"{path}, line {number}: '{word}' is not understood; write `name slots=2` or `name:2`")
        hosts.append(_host(name, slots, where=f"{path}, line {number}"))
    if not hosts:
        raise UsageError(f"{path} names no host")
    return _checked(hosts)


def _host(name: str, slots: str, where: str) -> Host:
    if len(name) > 253 or not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name!a} is not the name of a host")
    if slots and not (slots.isascii() and slots.isdigit() and 1 <= int(slots) <= MOST_SLOTS):
        raise UsageError(f"{where}: {slots!a} is not a number of slots from 1 to {MOST_SLOTS}")
    return Host(name, int(slots or 1))


def _checked(hosts: list[Host]) -> list[Host]:
    names = [host.name for host in hosts]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"host {', '.join(sorted(twice))} is named twice: give each once, with its slots")
    return hosts


def needed(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """The hosts with as many of their slots as a job of so many ranks takes, filled evenly.

    A round gives each host that has room one rank, so that servers, the first ranks, are spread.

    Raises:
        UsageError: there are too few slots.
    """
    if sum(host.slots for host in hosts) < ranks:
        told = " + ".join(f"{host.slots} on {host.name}" for host in hosts)
        raise UsageError(f"{ranks} ranks need {ranks} slots, and there are {told}: name more hosts, or more slots")
    taken = [0] * len(hosts)
    for _ in range(ranks):
        fullest = min((i for i, host in enumerate(hosts) if taken[i] < host.slots), key=lambda i: (taken[i], i))
        taken[fullest] += 1
    return [Host(host.name, slots) for host, slots in zip(hosts, taken, strict=True) if slots]
