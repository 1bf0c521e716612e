"""Ends a rank whose starter is gone: mpirun and horovodrun, when they are killed, cannot end their ranks themselves."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

# The third word may be it: `python -m torch.distributed.run`.
_STARTERS = {"horovodrun", "mpirun", "mpiexec", "prterun", "torchrun", "torch.distributed.run"}
_BY_HAND = {"alone", "env"}
_SSHD = {"sshd", "sshd-session"}
_EVERY_S = 1.0


def die_with_parent(how: signal.Signals) -> None:
    """Linux: have the kernel send this process that signal when its parent dies, however that happens."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, how)


def end_with_starter(name: str, by_recipe: bool = False) -> None:
    """From now on, end this process (exit code 143) within a few seconds of its starter's end, however that comes.

    Args:
        name: the starter's, as World has it. What was started by hand, over ssh perhaps, may outlive who did it.
        by_recipe: a launcher's recipe had that started: a shell of its own, or an actor of Ray.
    """
    starter = None
    if by_recipe and name == "env":
        starter = psutil.Process().parent()  # none of a container's first process
    elif name not in _BY_HAND:
        starter = _starter()
    if starter:
        threading.Thread(target=_watch, args=(starter,), daemon=True, name="starter's end").start()


def end_with(pid: int) -> None:
    """From now on, end this process (exit code 143) within a second or two of that process's end."""
    try:
        starter = psutil.Process(pid)
    except psutil.NoSuchProcess:  # it has ended already
        os._exit(143)
    threading.Thread(target=_watch, args=(starter,), daemon=True, name="starter's end").start()


def _starter() -> psutil.Process | None:
    """The outermost ancestor that starts ranks: horovodrun starts mpirun.

    Where it is on another host, the sshd that serves its connection, which ends with that. None where there is neither.
    """
    starter = session = None
    for ancestor in psutil.Process().parents():
        try:
            name, words = ancestor.name(), {Path(word).name for word in ancestor.cmdline()[:3]}
        except psutil.Error:
            continue
        if session is None and name in _SSHD:
            session = ancestor
        if words & _STARTERS:
            starter = ancestor
    return starter or session


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, and is no zombie: in containers there may be no process that reaps those."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def _watch(starter: psutil.Process) -> None:
    while is_alive(starter):
        time.sleep(_EVERY_S)
    print("hvdtrain: what started this rank has ended, and so does it", file=sys.stderr, flush=True)
    os._exit(143)
