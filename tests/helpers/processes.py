"""Processes that tests start, and those that they look for."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable

import psutil

SMALL_TURNTABLE = {"objects": 3, "views": 10}


def run_python(code: str, **environment: str) -> "subprocess.Popen[str]":
    """A Python process that runs the code; its output is a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def ranks_among(processes: Iterable[psutil.Process], *variables: str) -> dict[int, psutil.Process]:
    """The ranks of hvdtrain among processes, by the first of these variables of the environment
    that they have.
    """
    ranks = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            number = next(
                (value for name in variables if (value := process.environ().get(name))), None
            )
            if number and "hvdtrain" in process.cmdline() and process.name().startswith("python"):
                ranks[int(number)] = process
    return ranks
