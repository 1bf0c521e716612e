"""Ranks that `launch`, `compare` and starters start are forked from a process that has torch
loaded: real ranks of real starters, without two seconds of imports each.
"""

import functools
import os
import shlex
import sys
from pathlib import Path

import pytest

from helpers.fork_proxy import fork_ranks, through_proxy
from helpers.forked import fork_server, new_folder
from helpers.jobs import ENV
from hvdtrain.launch import prepare

TESTS = str(Path(__file__).parent.parent)


def forks_first() -> str:
    """What a forked command runs first, so that the ranks of its jobs are forked too."""
    path = f"import sys; sys.path.append({TESTS!r}); "
    return f"{path}from helpers.fork_proxy import fork_ranks; fork_ranks({fork_server()!r})\n"


def forked_hvdtrain() -> list[str]:
    """The command `hvdtrain`; the ranks of its jobs on this machine are forked."""
    return [sys.executable, "-Pc", f"{forks_first()}from hvdtrain.cli import main; main()"]


def fork_ranks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks of jobs that this process starts forked, in this test."""
    monkeypatch.setattr(prepare, "expand", prepare.expand)  # which is put back afterwards
    fork_ranks(fork_server())


def env_with_forks() -> dict[str, str]:
    """The environment in which starters find a `hvdtrain` that is forked."""
    return ENV | {"PATH": f"{_folder_of_script()}{os.pathsep}{ENV['PATH']}"}


@functools.cache
def _folder_of_script() -> Path:
    """Returns the folder of a script `hvdtrain` that is forked."""
    script = new_folder() / "hvdtrain"
    words = through_proxy(fork_server(), [sys.executable, "-Pm", "hvdtrain"])
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o700)
    return script.parent
