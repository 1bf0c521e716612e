"""A server's state, in memory that outlives its process.

A server that comes back finds its state as it was last whole. The memory is a memfd: it has no name
that could be left behind. Another process of the job holds it open too (see rank.respawn). So the
memory is there when the server's process was killed, and is gone with the last of the two.

Each part of the state, such as a bucket, is saved whole or not at all. There are two copies of each
tensor, and two records of the small rest. A change is written over the copy that the newest record
does not name; then the new record, in place of the older one, names it. A record that a kill cut
off is recognized by its checksum: the other one counts.
"""

import math
import os
import pickle
import struct
import threading
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from hvdtrain.base.errors import Failure
from hvdtrain.base.system.mapping import map_file
from hvdtrain.runs.join_info import MEMORY_NAME

RECORD = 2**28  # bytes that a record may have; memory that is never written to costs nothing
PAGE = 2**12
_HEAD = struct.Struct("!QQI")  # a record's number, length and checksum


class CrashMemory:
    """The memory of one server.

    Args:
        file: a file descriptor of a killed server's memory; None: a new memory.

    Attributes:
        file: the file descriptor of this memory.
        parts: where the records of each part begin, by the part's name.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file = os.memfd_create(MEMORY_NAME) if file is None else file
        self._lock = threading.RLock()
        self._end = max(os.fstat(self.file).st_size, 2 * RECORD)
        self.parts: dict[str, int] = {}
        self._directory = _Records(self.file, 0)
        if file is not None:
            self.parts = self._directory.read() or {}

    def state_of(self, name: str) -> "SavedState":
        """Returns the part of this name, as it was saved; empty where it was not."""
        with self._lock:
            if name not in self.parts:
                self.parts[name] = self.allocate(2 * RECORD)
                self._directory.write(self.parts)
        return SavedState(self, self.parts[name])

    def allocate(self, size: int) -> int:
        """Returns where so many bytes begin that nobody uses."""
        pages = -(-size // PAGE)
        with self._lock:
            start = self._end
            self._end += pages * PAGE
            os.ftruncate(self.file, self._end)
            return start


class _Records:
    """Two places for a record, the older of which is written over.

    Attributes:
        number: the number of the newest record; 0: there is none.
    """

    def __init__(self, file: int, start: int) -> None:
        self.file = file
        self.start = start
        self.number = 0

    def write(self, value: Any) -> None:
        content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if len(content) > RECORD - _HEAD.size:
            raise Failure(f"a parameter server cannot keep {len(content):,} bytes of what it knows")
        self.number += 1
        head = _HEAD.pack(self.number, len(content), zlib.crc32(content, self.number))
        rest = memoryview(head + content)
        at = self.start + self.number % 2 * RECORD
        while rest:
            written = os.pwrite(self.file, rest, at)
            rest = rest[written:]
            at += written

    def read(self) -> Any:
        """Returns the newest record that is whole; None where there is none."""
        newest = None
        self.number = 0
        for place in (0, 1):
            at = self.start + place * RECORD
            head = os.pread(self.file, _HEAD.size, at)
            number, length, checksum = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
            if number <= self.number or length > RECORD:
                continue
            content = os.pread(self.file, length, at + _HEAD.size)
            if len(content) == length and zlib.crc32(content, number) == checksum:
                newest = content
                self.number = number
        return None if newest is None else pickle.loads(newest)


class SavedState:
    """The saved state of one part. One thread at a time may use it.

    Args:
        memory: the memory that the state is in.
        start: where the part's records begin.

    Attributes:
        plain: the object for pickle that was saved; None where nothing was.
    """

    def __init__(self, memory: CrashMemory, start: int) -> None:
        self._memory = memory
        self._records = _Records(memory.file, start)
        self._places: dict[str, list[_Place]] = {}  # where the two copies of each tensor are
        self._valid: dict[str, int] = {}  # which of the copies counts
        self._stamps: dict[str, object] = {}  # the stamp that each tensor was saved with
        self.plain: Any = None
        saved = self._records.read()
        if saved is not None:
            self.plain, keys, self._valid = saved
            for name, places in keys.items():
                self._places[name] = [_Place(memory.file, *key) for key in places]

    def save(self, plain: Any, tensors: Mapping[str, tuple[torch.Tensor | None, object]]) -> None:
        """Saves a state in place of the former one. Its objects may change when this returns.

        Args:
            plain: an object for pickle.
            tensors: CPU tensors by name, each with a stamp. A tensor is the same as the last time
                where its stamp is.
        """
        valid = {}
        for name, (tensor, stamp) in tensors.items():
            if tensor is None:
                continue
            is_saved = name in self._valid and self._stamps.get(name, self) == stamp
            if is_saved:
                valid[name] = self._valid[name]
            else:
                valid[name] = 1 - self._valid.get(name, 1)
                self._copy(name, valid[name], tensor)
        keys = {name: [place.key for place in places] for name, places in self._places.items()}
        self._records.write((plain, keys, valid))
        self._valid = valid
        self._stamps = {name: stamp for name, (_, stamp) in tensors.items() if name in valid}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns copies of the tensors that were saved."""
        return {
            name: self._places[name][which].tensor.clone() for name, which in self._valid.items()
        }

    def _copy(self, name: str, which: int, tensor: torch.Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = list(tensor.shape)
        places = self._places.get(name, [])
        if not places or places[0].key[1:] != (dtype, shape):
            # The copy that counts may be one of another shape, whose memory stays as it is.
            starts = [self._memory.allocate(max(1, tensor.nbytes)) for _ in range(2)]
            places = [_Place(self._memory.file, start, dtype, shape) for start in starts]
            self._places[name] = places
        places[which].tensor.copy_(tensor)


class _Place:
    """The place of one copy of a tensor."""

    def __init__(self, file: int, start: int, dtype: str, shape: list[int]) -> None:
        self.key = (start, dtype, shape)
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        if size:
            memory = torch.frombuffer(map_file(file, start, size), dtype=kind)
        else:
            memory = torch.empty(0, dtype=kind)
        self.tensor = memory.view(shape)
