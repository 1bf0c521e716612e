"""Predictions on all cores."""

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from hvdtrain.base.system.cgroups import usable_cores

# Fewer predictions are not worth the processes.
LEAST_ITEMS = 4
Item = TypeVar("Item")
Result = TypeVar("Result")


def each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Returns what a function makes of each item, on as many processes as there are cores.

    The processes are forked. Where this process has other threads, as a notebook or torch has, it
    does all work itself.
    """
    processes = min(int(usable_cores()), len(items))
    may_fork = threading.active_count() == 1 and "torch" not in sys.modules
    if processes < 2 or len(items) < LEAST_ITEMS or not may_fork:
        return [work(item) for item in items]
    context = multiprocessing.get_context("fork")
    # Unlike multiprocessing's pool it raises an exception when a process is killed.
    with ProcessPoolExecutor(processes, context, _leave_interrupts) as pool:
        return list(pool.map(work, items))


def _leave_interrupts() -> None:
    """Leaves Ctrl-C to the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
