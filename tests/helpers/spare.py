"""Ranks that starters start are forked from a process that has torch loaded, as with `launch --retries`."""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from helpers.jobs import ENV, until
from hvdtrain.launch import stand_in


@contextlib.contextmanager
def ranks_from_a_spare(folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    """While the block lasts, ranks are there at once.

    Returns:
        the environment in which `hvdtrain` is the spare's, for starters, and what a forked command runs first, so that
        the ranks that it has started are the spare's too.
    """
    place = folder / "spare"
    words = [sys.executable, "-S", "-E", stand_in.__file__, str(place)]
    script = folder / "bin" / "hvdtrain"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec {shlex.join([*words, sys.executable, "-m", "hvdtrain"])} "$@"\n')
    script.chmod(0o700)
    spare = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain.rank.spare", str(place)], env=ENV | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    first = f"""
import dataclasses
from hvdtrain.launch import prepare
expand = prepare.expand
def through_stand_ins(launcher, spec):
    return expand(launcher, dataclasses.replace(spec, program=[*{words!r}, *spec.program]))
prepare.expand = through_stand_ins
"""
    try:
        until(place.exists)
        yield ENV | {"PATH": f"{script.parent}{os.pathsep}{ENV['PATH']}"}, first
    finally:
        spare.kill()
        spare.wait()
