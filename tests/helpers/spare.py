"""Ranks that starters start are forked from a process that has torch loaded, as with `launch --retries`."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from helpers.jobs import ENV, until
from hvdtrain.launch.recipe import LaunchCommand
from hvdtrain.launch.spare_ranks import spare_ranks


@contextlib.contextmanager
def ranks_from_a_spare(folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    """While the block lasts, ranks are there at once.

    Returns:
        the environment in which `hvdtrain` is the spare's, for starters, and what a forked command runs first, so that
        the ranks that it has started are the spare's too.
    """
    program = [sys.executable, "-m", "hvdtrain"]
    with spare_ranks(LaunchCommand(program, {}, dict(ENV)), folder) as command:
        script = folder / "bin" / "hvdtrain"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\nexec {shlex.join(command.argv)} "$@"\n')
        script.chmod(0o700)
        first = f"""
import dataclasses
from hvdtrain.launch import prepare
expand = prepare.expand
def through_stand_ins(launcher, spec):
    return expand(launcher, dataclasses.replace(spec, program=[*{command.argv[: -len(program)]!r}, *spec.program]))
prepare.expand = through_stand_ins
"""
        until((folder / "spare").exists)
        yield ENV | {"PATH": f"{script.parent}{os.pathsep}{ENV['PATH']}"}, first
