"""Commands on hosts: over ssh, or without it where the host is this machine."""

import shlex
import socket
from collections.abc import Sequence

from hvdtrain.launch.probe import own_addresses

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]


def on(host: str, command: Sequence[str]) -> list[str]:
    """The words that run a command on a host, quoted for the shell there."""
    return ["sh", "-c", shlex.join(command)] if is_here(host) else [*SSH, host, shlex.join(command)]


def in_folder(folder: str, command: Sequence[str]) -> list[str]:
    """The command, run in a folder; it fails where there is none."""
    return ["sh", "-c", 'cd "$0" && exec "$@"', folder, *command]


def is_here(host: str) -> bool:
    """Whether the name is this machine's: starters use no ssh for it either."""
    address = address_of(host)
    return address.startswith("127.") or address in own_addresses()


def address_of(host: str) -> str:
    """The IPv4 address that a name means here, or nothing."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""
