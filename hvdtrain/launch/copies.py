"""Copies of folders on other hosts, made with rsync. A folder there is overwritten only if an earlier copy made it."""

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.run_config import RunConfig
from hvdtrain.data.find import is_name, is_url
from hvdtrain.errors import UsageError
from hvdtrain.launch.remote import SSH, command_on, is_local

MARKER = ".hvdtrain-copy"  # a folder that holds this file is a copy: rsync may delete in it
# rsync's options. What is excluded (.git, .venv and .env among it) is neither copied nor deleted on the hosts.
CODE_OPTIONS = ("--exclude=/.*", "--exclude=/runs", "--exclude=/data")
DATA_OPTIONS = ("--copy-links",)
# Marks a folder as a copy if it is new, empty or marked already, and fails otherwise. $0 is the folder, $1 says where
# the copy comes from. The marker holds the folder's own path: where a user copies the folder elsewhere, marker
# included, the paths differ and the folder is the user's.
CLAIM_SCRIPT = f"""
if [ -e "$0" ] && [ ! -d "$0" ]; then echo "$0 is no folder" >&2; exit 1; fi
if [ "$(head -n 1 "$0/{MARKER}" 2>/dev/null)" != "$0" ] && [ -n "$(ls -A "$0" 2>/dev/null)" ]; then
  echo "$0 holds files and is no copy that hvdtrain made: name a new or empty folder" >&2; exit 1
fi
mkdir -p "$0" && printf '%s\\n' "$0" "$1" > "$0/{MARKER}"
"""


def check_destination(folder: str) -> str:
    """--sync-dst-dir, normalised. UsageError where it is no absolute path, or lies in the folder that is copied."""
    path, here = Path(os.path.normpath(folder)), Path.cwd()
    if not path.is_absolute() or not folder.isprintable():
        raise UsageError(f"--sync-dst-dir {folder!a} is not an absolute path such as /tmp/hvdtrain")
    if path != here and (path in here.parents or here in path.parents):
        raise UsageError(f"--sync-dst-dir {path} and the folder that is copied, {here}, lie one in the other")
    return str(path)


def data_folder(config: RunConfig) -> Path:
    """The folder that --dataset names. UsageError where it names something else."""
    if is_url(config.dataset):
        raise UsageError(f"--sync-data copies a folder: {config.dataset} is a URL, which every host reads itself")
    if is_name(config.dataset):
        raise UsageError(f"--sync-data copies a folder: {config.dataset} is a name, which every host builds itself")
    folder = Path(config.dataset).expanduser().absolute()
    if not folder.is_dir():
        raise UsageError(f"--sync-data: there is no folder {folder}")
    return folder


@dataclass(frozen=True)
class Copy:
    """What is copied, and to which folder on every host; options are rsync's."""

    source: Path
    destination: str
    options: Sequence[str]

    def make(self, hosts: Sequence[str]) -> None:
        """Make the folder on every host a copy of the source; what the source does not have is deleted.

        Raises:
            UsageError: with a line for each host that it did not work on, and why.
        """
        if not shutil.which("rsync"):
            raise UsageError("--sync-dst-dir needs rsync, on this machine and on the hosts")
        targets = self._without_source(hosts)
        with ThreadPoolExecutor(32) as pool:
            errors = list(pool.map(lambda host: _run(self._claim_command(host)), targets))
        if not any(errors):
            # One host after the other: they share this machine's link, and may share the folder's storage.
            errors = [_run(self._rsync_command(host)) for host in targets]
        if problems := [f"{host}: {error}" for host, error in zip(targets, errors, strict=True) if error]:
            raise UsageError(*problems)

    def shell_commands(self, hosts: Sequence[str]) -> list[str]:
        """What `make` runs, for --dry-run."""
        targets = self._without_source(hosts)
        return [shlex.join(command(host)) for command in (self._claim_command, self._rsync_command) for host in targets]

    def _without_source(self, hosts: Sequence[str]) -> list[str]:
        """The hosts, without this machine if the destination is the source itself."""
        is_source = Path(self.destination).resolve() == self.source.resolve()
        return [host for host in hosts if not (is_source and is_local(host))]

    def _claim_command(self, host: str) -> list[str]:
        origin = f"copied from {socket.gethostname()}:{self.source} by hvdtrain launch --sync-dst-dir"
        return command_on(host, ["sh", "-c", CLAIM_SCRIPT, self.destination, origin])

    def _rsync_command(self, host: str) -> list[str]:
        destination = f"{self.destination}/" if is_local(host) else f"{host}:{self.destination}/"
        # -s: no shell on the host interprets file names.
        rsync = ["rsync", "-rlpt", "-s", "--delete", f"--exclude=/{MARKER}", *self.options, "-e", shlex.join(SSH)]
        return [*rsync, f"{self.source}/", destination]


def _run(command: Sequence[str]) -> str:
    """Run a command; return why it failed, or an empty string."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if not done.returncode:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[0] if lines else f"`{command[0]}` ended with exit code {done.returncode}"
