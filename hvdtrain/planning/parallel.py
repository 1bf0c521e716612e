"""Predictions on all cores."""

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import TypeVar

from hvdtrain.base.system.cgroups import usable_cores
from hvdtrain.base.system.parent import die_with_parent

# Fewer predictions are not worth the processes.
LEAST_ITEMS = 4
Item = TypeVar("Item")
Result = TypeVar("Result")


def each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Returns what a function makes of each item, on as many processes as there are cores.

    The processes are forked. Where this process has other threads, as a notebook or torch has, it
    does all work itself. So it does where processes cannot be started, or one is killed.

    The last items are begun first. They usually have most workers and take longest, so that at the
    end no process computes long while others have nothing to do.
    """
    processes = min(int(usable_cores()), len(items))
    is_alone = threading.active_count() == 1 and "torch" not in sys.modules
    # A worker of multiprocessing may have no processes of its own.
    may_fork = is_alone and not multiprocessing.current_process().daemon
    if processes < 2 or len(items) < LEAST_ITEMS or not may_fork:
        return [work(item) for item in items]
    context = multiprocessing.get_context("fork")
    # Unlike multiprocessing's pool it raises an exception when a process is killed.
    try:
        with ProcessPoolExecutor(processes, context, _begin) as pool:
            last_first = list(pool.map(work, reversed(items)))
            return last_first[::-1]
    except (BrokenExecutor, ImportError, NotImplementedError, OSError):
        return [work(item) for item in items]


def _begin() -> None:
    """Leaves Ctrl-C to the process that started this one, and has this one end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
