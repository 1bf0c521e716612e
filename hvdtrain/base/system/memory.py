"""The memory of this process: how the allocator keeps it, and how much there is."""

import contextlib
import ctypes
import gc
import resource
import threading
from collections.abc import Iterator

from hvdtrain.base.system.cgroups import memory_limit

# Bytes. Glibc gives larger blocks back to the system in any case.
LARGEST_KEPT = 32 * 2**20
# Parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


class _Peak:
    """The most resident memory of this process so far, in bytes, without memory of others.

    Memory of others that is mapped no more still counts as theirs: the system's peak has it.
    """

    def __init__(self) -> None:
        self._of_others = 0
        self._most = 0
        self._lock = threading.Lock()

    def more_of_others(self, size: int) -> None:
        with self._lock:
            self._look()  # before the peak grows by it
            self._of_others += size

    def most(self) -> int:
        with self._lock:
            self._look()
            return self._most

    def _look(self) -> None:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._most = max(self._most, resident - self._of_others)


_peak = _Peak()


def keep_memory() -> None:
    """Keeps freed memory in this process for the next step, if glibc's mallopt(3) is there.

    New memory costs page faults when it is first touched. All ranks keep theirs, so that no mode has
    faster memory than another. Call this before threads begin, since a
    thread that allocates earlier has a separate arena.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_ARENA_MAX, 1)  # memory that one thread frees is for all threads


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Suspends garbage collection in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Suspends garbage collection in the block, and exempts all objects so far from it for good.

    Importing torch creates so many objects that collecting among them takes much of the import.
    """
    with without_collecting():
        try:
            yield
        finally:
            gc.freeze()


def free_memory() -> int:
    """Returns the bytes that this process could take, within its host and control groups."""
    import psutil

    return int(min(psutil.virtual_memory().available, memory_limit()))


def count_memory_of_others(size: int) -> None:
    """Takes note that this process will touch so many more bytes of another process's memory."""
    _peak.more_of_others(size)


def peak_rss_mb() -> float:
    """Returns this process's largest resident memory so far, in MB of 2^20 bytes.

    Memory of other ranks that this process has mapped is left out: it counts once, for its owner.
    """
    return _peak.most() / 2**20
