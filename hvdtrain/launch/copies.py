"""Copies of the current folder on hosts, made with rsync.

A folder on a host is overwritten only if it is an earlier copy.
"""

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.base.errors import UsageError
from hvdtrain.launch.hosts import SSH, command_on, is_local

MARKER = ".hvdtrain-copy"  # a folder that holds this file is a copy, in which rsync may delete
# Excluded files (.git, .venv and .env among them) are neither copied nor deleted on the hosts.
EXCLUDED = (f"--exclude=/{MARKER}", "--exclude=/.*", "--exclude=/runs", "--exclude=/data")
# Marks a folder as a copy if it is new, empty or marked already, and fails otherwise. $0 is the
# folder, $1 says where the copy comes from. The marker holds the folder's path. If a user copies
# the folder elsewhere, marker included, the paths differ, and the folder counts as the user's.
CLAIM_SCRIPT = f"""
if [ -e "$0" ] && [ ! -d "$0" ]; then echo "$0 is no folder" >&2; exit 1; fi
if [ "$(head -n 1 "$0/{MARKER}" 2>/dev/null)" != "$0" ] && [ -n "$(ls -A "$0" 2>/dev/null)" ]; then
  echo "$0 holds files and is no copy that hvdtrain made: name a new or empty folder" >&2; exit 1
fi
mkdir -p "$0" && printf '%s\\n' "$0" "$1" > "$0/{MARKER}"
"""
Commands = dict[str, list[list[str]]]  # by host


def check_destination(folder: str) -> str:
    """Returns the value of --sync-dst-dir, normalised.

    Raises:
        UsageError: it is no absolute path, or lies in the folder that is copied, or around it.
    """
    path = Path(os.path.normpath(folder))
    here = Path.cwd()
    if not path.is_absolute() or not folder.isprintable():
        raise UsageError(f"--sync-dst-dir {folder!a} is not an absolute path such as /tmp/hvdtrain")
    if path != here and (path in here.parents or here in path.parents):
        raise UsageError(
            f"--sync-dst-dir {path} and the folder that is copied, {here}: one of these folders is "
            "inside the other"
        )
    return str(path)


def copy_commands(hosts: Sequence[str], destination: str) -> Commands:
    """Returns the commands for each host that mark the folder there as a copy and update it.

    A host on which the folder is the current one has no commands.
    """
    here = Path.cwd()
    origin = f"copied from {socket.gethostname()}:{here} by hvdtrain launch --sync-dst-dir"
    # -s: no shell on the host interprets file names.
    rsync = ["rsync", "-rlpt", "-s", "--delete", *EXCLUDED, "-e", shlex.join(SSH), f"{here}/"]
    commands = {}
    for host in hosts:
        is_here = is_local(host)
        if is_here and Path(destination).resolve() == here.resolve():
            continue
        claim = command_on(host, ["sh", "-c", CLAIM_SCRIPT, destination, origin])
        target = f"{destination}/" if is_here else f"{host}:{destination}/"
        commands[host] = [claim, [*rsync, target]]
    return commands


def copy_here_to(hosts: Sequence[str], destination: str) -> None:
    """Makes the folder on every host a copy of the current one, and deletes other files in it.

    Raises:
        UsageError: copying failed. The error has a line for each host on which it did.
    """
    if not shutil.which("rsync"):
        raise UsageError("--sync-dst-dir needs rsync, on this machine and on the hosts")
    # One host after the other: they share this machine's link, and may share the folder's storage.
    problems = []
    for host, commands in copy_commands(hosts, destination).items():
        error = _run(commands)
        if error:
            problems.append(f"{host}: {error}")
    if problems:
        raise UsageError(*problems)


def _run(commands: Sequence[Sequence[str]]) -> str:
    """Runs commands one after the other. Returns why one failed, or an empty string."""
    for command in commands:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            return lines[0] if lines else f"`{command[0]}` ended with exit code {done.returncode}"
    return ""
