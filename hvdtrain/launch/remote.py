"""Commands on hosts: over ssh, or without it where the host is this machine."""

import os
import shlex
from collections.abc import Sequence

from hvdtrain.world.network import own_addresses, resolve

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]


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
