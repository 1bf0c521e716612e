"""Ends a rank whose starter is gone: mpirun and horovodrun, when they are killed, cannot end their ranks themselves."""

import os
import sys
import threading
import time
from pathlib import Path

import psutil

_STARTERS = {"horovodrun", "mpirun", "mpiexec", "prterun", "torchrun", "torch.distributed.run"}
_EVERY_S = 1.0


def end_with_starter() -> None:
    """From now on, end this process (exit code 143) within a few seconds of its starter's end, however that comes."""
    if starter := _starter():
        threading.Thread(target=_watch, args=(starter,), daemon=True, name="starter's end").start()


def _starter() -> psutil.Process | None:
    """The outermost ancestor that starts ranks: horovodrun starts mpirun. None where it is on another host."""
    found = None
    for ancestor in psutil.Process().parents():
        try:
            words = {Path(word).name for word in ancestor.cmdline()[:3]}  # `python -m torch.distributed.run`
        except psutil.Error:
            continue
        if words & _STARTERS:
            found = ancestor
    return found


def _watch(starter: psutil.Process) -> None:
    while starter.is_running() and starter.status() != psutil.STATUS_ZOMBIE:
        time.sleep(_EVERY_S)
    print("hvdtrain: what started this rank has ended, and so does it", file=sys.stderr, flush=True)
    os._exit(143)
