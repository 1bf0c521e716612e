"""Copies of folders on other hosts, with rsync. Nothing there is overwritten that is not such a copy already."""

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdtrain import recipes
from hvdtrain.config import RunConfig
from hvdtrain.data.find import is_url
from hvdtrain.errors import UsageError
from hvdtrain.launch.remote import SSH, is_here, on

MARK = ".hvdtrain-copy"  # the file in a folder that says it is a copy: rsync may delete in it
# What is not code stays here, .git, .venv and .env among it; rsync leaves what it excludes alone on the hosts, too.
CODE = ("--exclude=/.*", "--exclude=/runs", "--exclude=/data")
DATA = ("--copy-links",)
# $0: the folder; $1: what else goes into the mark. A folder that is new, empty or marked is taken, and marked first.
# The mark holds the folder's path: a copy that somebody makes of it is theirs.
TAKE = f"""
if [ -e "$0" ] && [ ! -d "$0" ]; then echo "$0 is no folder" >&2; exit 1; fi
if [ "$(head -n 1 "$0/{MARK}" 2>/dev/null)" != "$0" ] && [ -n "$(ls -A "$0" 2>/dev/null)" ]; then
  echo "$0 holds files and is no copy that hvdtrain made: name a new or empty folder" >&2; exit 1
fi
mkdir -p "$0" && printf '%s\\n' "$0" "$1" > "$0/{MARK}"
"""


def target(folder: str) -> str:
    """Where --sync-dst-dir copies to. UsageError where it is not an absolute path, or holds what it copies."""
    path, here = Path(os.path.normpath(folder)), Path.cwd()
    if not path.is_absolute() or not folder.isprintable():
        raise UsageError(f"--sync-dst-dir {folder!a} is not an absolute path such as /tmp/hvdtrain")
    if path != here and (path in here.parents or here in path.parents):
        raise UsageError(f"--sync-dst-dir {path} and the folder that is copied, {here}, lie one in the other")
    return str(path)


def data_folder(config: RunConfig) -> Path:
    """The folder of --dataset. UsageError where it is none."""
    if is_url(config.dataset):
        raise UsageError(f"--sync-data copies a folder: {config.dataset} is a URL, which every host reads itself")
    if config.dataset in recipes.names("datasets"):
        raise UsageError(f"--sync-data copies a folder: {config.dataset} is a name, which every host builds itself")
    folder = Path(config.dataset).expanduser().absolute()
    if not folder.is_dir():
        raise UsageError(f"--sync-data: there is no folder {folder}")
    return folder


@dataclass(frozen=True)
class Copy:
    """What is copied, and to which folder on every host; options are rsync's."""

    source: Path
    folder: str
    options: Sequence[str]

    def make(self, hosts: Sequence[str]) -> None:
        """Make the folder on every host a copy of the source; what is not in that is deleted.

        Raises:
            UsageError: with a line for each host that it did not work on, and why.
        """
        if not shutil.which("rsync"):
            raise UsageError("--sync-dst-dir needs rsync, on this machine and on the hosts")
        others = self._others(hosts)
        with ThreadPoolExecutor(32) as pool:
            told = dict(zip(others, pool.map(lambda host: _problem(self._take(host)), others), strict=True))
        if not any(told.values()):
            # One after the other: hosts may share the folder, and they do share this machine's link.
            told = {host: _problem(self._send(host)) for host in others}
        if problems := [f"{host}: {problem}" for host, problem in told.items() if problem]:
            raise UsageError(*problems)

    def shown(self, hosts: Sequence[str]) -> list[str]:
        """The commands as a shell takes them."""
        return [shlex.join(words) for make in (self._take, self._send) for words in map(make, self._others(hosts))]

    def _others(self, hosts: Sequence[str]) -> list[str]:
        """The hosts without this machine where the folder is what is copied."""
        is_source = Path(self.folder).resolve() == self.source.resolve()
        return [host for host in hosts if not (is_source and is_here(host))]

    def _take(self, host: str) -> list[str]:
        whence = f"copied from {socket.gethostname()}:{self.source} by hvdtrain launch --sync-dst-dir"
        return on(host, ["sh", "-c", TAKE, self.folder, whence])

    def _send(self, host: str) -> list[str]:
        there = f"{self.folder}/" if is_here(host) else f"{host}:{self.folder}/"
        # -s: names are sent as they are, no shell there reads them.
        words = ["rsync", "-rlpt", "-s", "--delete", f"--exclude=/{MARK}", *self.options, "-e", shlex.join(SSH)]
        return [*words, f"{self.source}/", there]


def _problem(words: Sequence[str]) -> str:
    """What went wrong when it was run, or nothing."""
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if not done.returncode:
        return ""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return said[0] if said else f"`{words[0]}` ended with exit code {done.returncode}"
