"""Processes of their own."""

import os
import subprocess
import sys

SMALL_TURNTABLE = {"objects": 3, "views": 10}


def run_python(code: str, **environment: str) -> "subprocess.Popen[str]":
    """A Python process of its own that runs the code; its output is a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
