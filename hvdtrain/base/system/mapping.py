"""Memory of files that several processes have mapped.

Python's own mmap would keep a file descriptor open for each mapping (until Python 3.13), and a
server has some ten tensors of each bucket.
"""

import ctypes
import mmap
import os
import weakref

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(file: int, start: int, size: int) -> "ctypes.Array[ctypes.c_char]":
    """Returns memory of a file, shared with all who map it, until the returned array is garbage.

    Args:
        file: the file descriptor, which may be closed afterwards.
        start: the byte of the file at which the memory begins, a multiple of the page size.
        size: the number of bytes, at least 1.

    Raises:
        OSError: the system cannot map it.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, file, start)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size:,} bytes: {os.strerror(number)}")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory


def prefer_huge_pages(memory: "ctypes.Array[ctypes.c_char]") -> None:
    """Asks the system for huge pages for this memory, which it may not have."""
    _libc.madvise(ctypes.addressof(memory), len(memory), mmap.MADV_HUGEPAGE)
