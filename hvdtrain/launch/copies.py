"""Copies of the current folder on hosts, made with rsync: one there is overwritten only if an earlier copy made it."""

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import SSH, command_on, is_local

MARKER = ".hvdtrain-copy"  # a folder that holds this file is a copy: rsync may delete in it
# What is excluded (.git, .venv and .env among it) is neither copied nor deleted on the hosts.
EXCLUDED = (f"--exclude=/{MARKER}", "--exclude=/.*", "--exclude=/runs", "--exclude=/data")
# Marks a folder as a copy if it is new, empty or marked already, and fails otherwise. $0 is the folder, $1 says where
# the copy comes from. The marker holds the folder's path: where a user copies the folder elsewhere, marker included,
# the paths differ and the folder is the user's.
CLAIM_SCRIPT = f"""
if [ -e "$0" ] && [ ! -d "$0" ]; then echo "$0 is no folder" >&2; exit 1; fi
if [ "$(head -n 1 "$0/{MARKER}" 2>/dev/null)" != "$0" ] && [ -n "$(ls -A "$0" 2>/dev/null)" ]; then
  echo "$0 holds files and is no copy that hvdtrain made: name a new or empty folder" >&2; exit 1
fi
mkdir -p "$0" && printf '%s\\n' "$0" "$1" > "$0/{MARKER}"
"""
Commands = dict[str, list[list[str]]]  # by host


def check_destination(folder: str) -> str:
    """--sync-dst-dir, normalised. UsageError where it is no absolute path, or lies in the folder that is copied."""
    path, here = Path(os.path.normpath(folder)), Path.cwd()
    if not path.is_absolute() or not folder.isprintable():
        raise UsageError(f"--sync-dst-dir {folder!a} is not an absolute path such as /tmp/hvdtrain")
    if path != here and (path in here.parents or here in path.parents):
        raise UsageError(f"--sync-dst-dir {path} and the folder that is copied, {here}, lie one in the other")
    return str(path)


def copy_commands(hosts: Sequence[str], destination: str) -> Commands:
    """For each host what marks the folder there as a copy, and what then makes it one; nothing where it is the current
    folder.
    """
    here = Path.cwd()
    origin = f"copied from {socket.gethostname()}:{here} by hvdtrain launch --sync-dst-dir"
    # -s: no shell on the host interprets file names.
    rsync = ["rsync", "-rlpt", "-s", "--delete", *EXCLUDED, "-e", shlex.join(SSH), f"{here}/"]
    commands = {}
    for host in hosts:
        if not is_local(host) or Path(destination).resolve() != here.resolve():
            claim = command_on(host, ["sh", "-c", CLAIM_SCRIPT, destination, origin])
            commands[host] = [claim, [*rsync, f"{destination}/" if is_local(host) else f"{host}:{destination}/"]]
    return commands


def copy_here_to(hosts: Sequence[str], destination: str) -> None:
    """Make the folder on every host a copy of the current one; what that does not have is deleted.

    Raises:
        UsageError: with a line for each host that it did not work on, and why.
    """
    if not shutil.which("rsync"):
        raise UsageError("--sync-dst-dir needs rsync, on this machine and on the hosts")
    # One host after the other: they share this machine's link, and may share the folder's storage.
    errors = {host: _run(commands) for host, commands in copy_commands(hosts, destination).items()}
    if problems := [f"{host}: {error}" for host, error in errors.items() if error]:
        raise UsageError(*problems)


def _run(commands: Sequence[Sequence[str]]) -> str:
    """Run commands, one after the other; return why one failed, or an empty string."""
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            return lines[0] if lines else f"`{command[0]}` ended with exit code {done.returncode}"
    return ""
