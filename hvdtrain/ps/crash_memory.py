"""What a server knows, in memory that outlives its process: whoever comes back there finds it as it last was whole.

The memory is a memfd: it has no name that could be left behind. Another process of the job holds it open too (see
rank.respawn), so that it is there when this one has been killed, and is gone with the last of them.

Each part of it, such as a bucket, is saved whole or not at all. Of each tensor there are two copies, and of the small
rest two records. What has changed is written over the copy that the newest record does not name; the new record, in
place of the older one, then names it. A record that a kill cut off is recognized by its checksum: the other one counts.
"""

import ctypes
import math
import mmap
import os
import pickle
import struct
import threading
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from hvdtrain.errors import Failure

RECORD = 2**28  # bytes that a record may have; memory that is never written to costs nothing
PAGE = 2**12
_HEAD = struct.Struct("!QQI")  # a record's number, length and checksum
MEMORY_NAME = "hvdtrain-kept"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


class CrashMemory:
    """The memory of one server.

    Args:
        file: of a server that was killed: a file descriptor of its memory.

    Attributes:
        parts: where the records of each begin, by its name.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file = os.memfd_create(MEMORY_NAME) if file is None else file
        self._lock = threading.RLock()
        self._end = max(os.fstat(self.file).st_size, 2 * RECORD)
        self.parts: dict[str, int] = {}
        self._directory = _Records(self.file, 0)
        if file is not None and (saved := self._directory.read()):
            self.parts = saved

    def state_of(self, name: str) -> "SavedState":
        """The part of that name, as it was saved, or empty."""
        with self._lock:
            if name not in self.parts:
                self.parts[name] = self.allocate(2 * RECORD)
                self._directory.write(self.parts)
        return SavedState(self, self.parts[name])

    def allocate(self, size: int) -> int:
        """Where so many bytes begin that are nobody's."""
        with self._lock:
            start, self._end = self._end, self._end + -(-size // PAGE) * PAGE
            os.ftruncate(self.file, self._end)
            return start


class _Records:
    """Two places for a record, the older of which is written over."""

    def __init__(self, file: int, start: int) -> None:
        self.file, self.start = file, start
        self.number = 0  # of the newest

    def write(self, value: Any) -> None:
        content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if len(content) > RECORD - _HEAD.size:
            raise Failure(f"a parameter server cannot keep {len(content):,} bytes of what it knows")
        self.number += 1
        head = _HEAD.pack(self.number, len(content), zlib.crc32(content, self.number))
        rest, at = memoryview(head + content), self.start + self.number % 2 * RECORD
        while rest:
            written = os.pwrite(self.file, rest, at)
            rest, at = rest[written:], at + written

    def read(self) -> Any:
        """The newest record that is whole; None where there is none."""
        newest, self.number = None, 0
        for place in (0, 1):
            at = self.start + place * RECORD
            head = os.pread(self.file, _HEAD.size, at)
            number, length, checksum = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
            if number <= self.number or length > RECORD:
                continue
            content = os.pread(self.file, length, at + _HEAD.size)
            if len(content) == length and zlib.crc32(content, number) == checksum:
                newest, self.number = content, number
        return None if newest is None else pickle.loads(newest)


class SavedState:
    """One part, which one thread at a time uses."""

    def __init__(self, memory: CrashMemory, start: int) -> None:
        self._memory, self._records = memory, _Records(memory.file, start)
        self._places: dict[str, list[_Place]] = {}  # of each tensor: where its two copies are
        self._valid: dict[str, int] = {}  # which of them counts
        self._stamps: dict[str, object] = {}  # what it was saved as
        saved = self._records.read()
        self.plain: Any = None
        if saved is not None:
            self.plain, where, self._valid = saved
            self._places = {name: [_Place(memory.file, *place) for place in places] for name, places in where.items()}

    def save(self, plain: Any, tensors: Mapping[str, tuple[torch.Tensor | None, object]]) -> None:
        """Have this in place of what was saved before. What it is made of may change when this returns.

        Args:
            plain: what pickle takes.
            tensors: CPU tensors by name, each with a stamp: it is the same as the last time if that is.
        """
        valid = {}
        for name, (tensor, stamp) in tensors.items():
            if tensor is None:
                continue
            if self._stamps.get(name, self) != stamp or name not in self._valid:
                valid[name] = 1 - self._valid.get(name, 1)
                self._copy(name, valid[name], tensor)
            else:
                valid[name] = self._valid[name]
        where = {name: [place.key for place in places] for name, places in self._places.items()}
        self._records.write((plain, where, valid))
        self._valid = valid
        self._stamps = {name: stamp for name, (_, stamp) in tensors.items() if name in valid}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of those that were saved."""
        return {name: self._places[name][which].tensor.clone() for name, which in self._valid.items()}

    def _copy(self, name: str, which: int, tensor: torch.Tensor) -> None:
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        places = self._places.get(name, [])
        if not places or places[0].key[1:] != (dtype, shape):
            starts = [self._memory.allocate(max(1, tensor.nbytes)) for _ in range(2)]
            # The copy that counts may be one of another shape, whose memory stays as it is.
            self._places[name] = [_Place(self._memory.file, start, dtype, shape) for start in starts]
        self._places[name][which].tensor.copy_(tensor)


class _Place:
    """Where a copy of a tensor is."""

    def __init__(self, file: int, start: int, dtype: str, shape: list[int]) -> None:
        self.key = start, dtype, shape
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        memory = torch.frombuffer(_mapped(file, start, size), dtype=kind) if size else torch.empty(0, dtype=kind)
        self.tensor = memory.view(shape)


def _mapped(file: int, start: int, size: int) -> "ctypes.Array[ctypes.c_char]":
    """Memory of a file that both see what is written to, for the rest of this process: Python's own mmap would keep a
    file descriptor open for each, and a server has some ten tensors of each bucket.
    """
    how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    at = _libc.mmap(None, size, *how, file, start)
    if at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"cannot keep {size:,} bytes")
    return (ctypes.c_char * size).from_address(at)
