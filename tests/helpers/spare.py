"""Ranks that `hvdtrain launch`, `compare` and starters start are forked from a process that has torch loaded, as with
`launch --retries`: real ranks of real starters, without two seconds of imports each.
"""

import atexit
import functools
import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from helpers import with_spare
from helpers.forked import FORKS, load_torch_once
from helpers.jobs import ENV, until
from hvdtrain.launch import prepare
from hvdtrain.launch.spare_ranks import through_stand_in


@functools.cache
def _place() -> Path:
    """The socket of the spare, which ends with this process."""
    load_torch_once()
    folder = Path(tempfile.mkdtemp(prefix="spare-", dir=os.environ.get("PRTE_MCA_prte_tmpdir_base")))
    spare = FORKS.Process(target=_serve, args=(folder / "spare",))
    spare.start()
    atexit.register(spare.join)  # what its ranks took is in `time`'s figures then
    atexit.register(spare.kill)
    until((folder / "spare").exists)
    return folder / "spare"


def _serve(place: Path) -> None:
    from hvdtrain.rank.spare import Spare

    Spare(place).serve()


def hvdtrain_with_spare() -> list[str]:
    """The command `hvdtrain`; the ranks of its jobs on this machine are the spare's."""
    return [sys.executable, "-P", with_spare.__file__, str(_place())]


def fork_ranks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks of jobs that this process starts be the spare's, in this test."""
    monkeypatch.setattr(prepare, "expand", prepare.expand)  # which is put back afterwards
    with_spare.fork_ranks(str(_place()))


def first_with_spare() -> str:
    """What a forked command runs first, so that the ranks of its jobs are the spare's."""
    return f"from helpers.with_spare import fork_ranks; fork_ranks({str(_place())!r})\n"


def env_with_spare() -> dict[str, str]:
    """The environment in which starters find a `hvdtrain` whose ranks are the spare's."""
    script = _place().with_name("bin") / "hvdtrain"
    if not script.exists():
        script.parent.mkdir()
        words = through_stand_in(_place(), [sys.executable, "-P", "-m", "hvdtrain"])
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        script.chmod(0o700)
    return ENV | {"PATH": f"{script.parent}{os.pathsep}{ENV['PATH']}"}
