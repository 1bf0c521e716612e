"""Ending a rank after its starter is gone.

When mpirun or horovodrun is killed, it cannot end its ranks itself.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

# The first three words of a command may name one, as in `python -m torch.distributed.run`.
_STARTERS = {"horovodrun", "mpirun", "mpiexec", "prterun", "torchrun", "torch.distributed.run"}
_BY_HAND = {"alone", "env"}
_SSHD = {"sshd", "sshd-session"}
_EVERY_S = 1.0


def die_with_parent(how: signal.Signals) -> None:
    """Has the kernel (of Linux) send this process the signal when its parent dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, how)


def end_with_starter(name: str, by_recipe: bool = False) -> None:
    """Ends this process with exit code 143, from now on, within seconds of its starter's end.

    A process that was started by hand, perhaps over ssh, may outlive its starter.

    Args:
        name: the starter's name, as World has it.
        by_recipe: whether a launcher's recipe started the rank, from a shell or an actor of Ray.
    """
    starter = None
    if by_recipe and name == "env":
        starter = psutil.Process().parent()  # None for a container's first process
    elif name not in _BY_HAND:
        starter = _starter()
    if starter:
        threading.Thread(target=_watch, args=(starter,), daemon=True, name="starter's end").start()


def end_with(pid: int) -> None:
    """Ends this process with exit code 143, from now on, within seconds of the other's end."""
    try:
        starter = psutil.Process(pid)
    except psutil.NoSuchProcess:  # it has ended already
        os._exit(143)
    threading.Thread(target=_watch, args=(starter,), daemon=True, name="starter's end").start()


def _starter() -> psutil.Process | None:
    """Returns the outermost ancestor that starts ranks, since horovodrun starts mpirun.

    If the starter is on another host, it is the sshd that serves the starter's connection, and ends
    with it. None if there is neither.
    """
    starter = session = None
    for ancestor in psutil.Process().parents():
        try:
            name = ancestor.name()
            words = {Path(word).name for word in ancestor.cmdline()[:3]}
        except psutil.Error:
            continue
        if session is None and name in _SSHD:
            session = ancestor
        if words & _STARTERS:
            starter = ancestor
    return starter or session


def is_alive(process: psutil.Process) -> bool:
    """Returns whether the process runs and is no zombie, which a container may never reap."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two calls
        return False


def _watch(starter: psutil.Process) -> None:
    while is_alive(starter):
        time.sleep(_EVERY_S)
    print("hvdtrain: what started this rank has ended, and so does it", file=sys.stderr, flush=True)
    os._exit(143)
