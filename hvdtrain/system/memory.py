"""How this process takes memory from the system, and how much it has."""

import contextlib
import ctypes
import gc
import resource
from collections.abc import Iterator

from hvdtrain.system.cgroups import memory_limit

LARGEST_KEPT = 32 * 2**20  # bytes: glibc gives what is larger back to the system in any case


def keep_memory() -> None:
    """Keep freed memory in this process, for the next message: glibc's mallopt(3), where there is one.

    What costs time in a message's new memory is the page faults of touching it first. Call it before threads
    begin: each that allocates earlier has taken an arena of its own.
    """
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(m_mmap_threshold, LARGEST_KEPT)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_arena_max, 1)  # what one thread frees is for all


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Within this block Python looks for no garbage, and never again among what was made in it: torch's import makes so
    many objects that looking through them took 0.4 of its 2 processor seconds.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def free_memory() -> int:
    """Bytes that this process could take, as far as the host and its control groups allow."""
    import psutil

    return int(min(psutil.virtual_memory().available, memory_limit()))


def peak_rss_mb() -> float:
    """This process's largest resident memory so far, in MB of 2^20 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
