"""Ranks that `launch`, `compare` and starters start are forked from a process that has torch loaded: real ranks of real
starters, without two seconds of imports each.
"""

import atexit
import functools
import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from helpers import forked_launch
from helpers.fork_server import ForkServer
from helpers.forked import FORKS, load_torch_once
from helpers.jobs import ENV, until
from hvdtrain.launch import prepare


@functools.cache
def _place() -> Path:
    """The socket of the fork server, which ends with this process."""
    load_torch_once()
    folder = Path(tempfile.mkdtemp(prefix="forks-", dir=os.environ.get("PRTE_MCA_prte_tmpdir_base")))
    server = FORKS.Process(target=_serve, args=(folder / "socket",))
    server.start()
    atexit.register(server.join)  # what its ranks took is in `time`'s figures then
    atexit.register(server.kill)
    until((folder / "socket").exists)
    return folder / "socket"


def _serve(place: Path) -> None:
    ForkServer(place).serve()


def forked_hvdtrain() -> list[str]:
    """The command `hvdtrain`; the ranks of its jobs on this machine are forked."""
    return [sys.executable, "-P", forked_launch.__file__, str(_place())]


def fork_ranks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks of jobs that this process starts forked, in this test."""
    monkeypatch.setattr(prepare, "expand", prepare.expand)  # which is put back afterwards
    forked_launch.fork_ranks(str(_place()))


def forks_first() -> str:
    """What a forked command runs first, so that the ranks of its jobs are forked too."""
    return f"from helpers.forked_launch import fork_ranks; fork_ranks({str(_place())!r})\n"


def env_with_forks() -> dict[str, str]:
    """The environment in which starters find a `hvdtrain` that is forked."""
    script = _place().with_name("bin") / "hvdtrain"
    if not script.exists():
        script.parent.mkdir()
        words = forked_launch.through_proxy(_place(), [sys.executable, "-Pm", "hvdtrain"])
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        script.chmod(0o700)
    return ENV | {"PATH": f"{script.parent}{os.pathsep}{ENV['PATH']}"}
