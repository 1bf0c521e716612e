"""Tensors from one process of this host to another, by memory that both share; the wire carries where they lie.

To copy from process to process by a system call (process_vm_readv, as TensorPipe does) takes two to three times as long
as to copy memory. So a tensor is copied once, into a slot of memory that its receiver has mapped too. What the receiver
gets is that memory, its own until it lets go of it: a byte for each slot and receiver says whether it is taken, which
the sender sets, and which the receiver clears when its tensor is garbage.

The memory is a memfd: it has no name that could be left behind, and is gone with the last process that has it. A peer
opens it as /proc/PID/fd/N, which the system grants to processes of the same user alone.
"""

import math
import mmap
import os
import threading
import weakref
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hvdtrain.wire.messages import INLINE_BYTES
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store

MOST = 128 * 2**20  # bytes of a process's slots: more than twice what is under way, see exchange.UNDER_WAY
HUGE = 2**21  # bytes of a huge page, where larger slots begin
GONE_KEPT = 2  # processes that have ended whose memory stays: an answer of one may still be on its way
FLAGS = 2**16  # the first bytes: COLUMNS of each slot, a byte that is 1 while it is taken
COLUMNS = 64  # one for each receiver, the last for the sender
RECEIVERS = SENDER = COLUMNS - 1  # what others are sent travels in messages
_NAME = "hvdtrain"
_FREE = bytes(COLUMNS)


class Parcel(NamedTuple):
    """Where a tensor lies.

    Attributes:
        pid, file: the memfd, as its owner has it.
        flag: which one to clear.
        start: in bytes, where the tensor begins in the file.
        dtype: as torch names it, without `torch.`.
    """

    pid: int
    file: int
    flag: int
    start: int
    dtype: str
    shape: list[int]


class SharedMemory:
    """What this process sends, and what it has opened of its peers' memory. Any thread may use it.

    Attributes:
        on: whether tensors go through it; else they are passed on as they are.
        pid, file: where others find it: see Parcel.
    """

    def __init__(self) -> None:
        self.on, self.pid, self.file = False, os.getpid(), os.memfd_create(_NAME)
        os.ftruncate(self.file, FLAGS)
        self._flags = mmap.mmap(self.file, FLAGS)
        self._slots: list[tuple[int, np.ndarray[Any, Any]]] = []  # where each begins, and its bytes
        self._contents: dict[object, int] = {}  # what lies where: see put
        self._end = FLAGS
        self._peers: dict[tuple[int, int], _Peer] = {}
        self._columns: dict[int, int] = {}  # of receivers that came in another's place; others' are their numbers
        self._spare_columns = deque(reversed(range(RECEIVERS // 2, RECEIVERS)))  # retired ones come last
        self._lock = threading.Lock()

    def join(self, world: World, store: "Store", patience: float) -> None:
        """Find out with the ranks at the other end whether all can open each other's memory: it is on, if so.

        Not where the job is on several hosts, nor with HVDTRAIN_OVER_TCP.

        Args:
            patience: seconds that this may take.
        """
        if not world.is_local or os.environ.get("HVDTRAIN_OVER_TCP"):
            return
        others = [rank for rank in range(world.size) if (rank < world.servers) != world.is_server]
        store.set(f"memory/{world.rank}", f"{self.pid} {self.file}")
        store.wait([f"memory/{rank}" for rank in others], timedelta(seconds=patience))
        try:
            for rank in others:
                self._open(*map(int, store.get(f"memory/{rank}").split()))
        except (OSError, ValueError):
            store.set("memory/not_shared", "")
        store.set(f"memory/{world.rank}/opened", "")
        store.wait([f"memory/{rank}/opened" for rank in others], timedelta(seconds=patience))
        self.on = not store.check(["memory/not_shared"])

    def put(self, tensor: torch.Tensor, receiver: int, content: object = None, held: bool = False) -> Any:
        """Copy a CPU tensor to where the receiver, a number of the caller's, may read it.

        Args:
            content: equal for equal tensors that receivers only read: if it lies there already, nothing is copied.
            held: what lies there stays, until `release`, even when the receiver has let go of it.

        Returns:
            the Parcel to send; the tensor itself where it is small, or no memory is left.
        """
        size = tensor.nbytes
        if not self.on or size <= INLINE_BYTES or receiver >= RECEIVERS:
            return tensor
        with self._lock:
            column, slot = self._columns.get(receiver, receiver), self._contents.get(content)
            if is_new := slot is None or bool(self._flags[slot * COLUMNS + column]):
                # The first that fits, so that few are in use, and those in the processor's caches.
                fitting = (number for number, (_, memory) in enumerate(self._slots) if size <= len(memory) <= 2 * size)
                free = (n for n in fitting if self._flags[n * COLUMNS : (n + 1) * COLUMNS] == _FREE)
                if (slot := next(free, None)) is None and (slot := self._add_slot(size)) is None:
                    return tensor
                self._contents = {what: where for what, where in self._contents.items() if where != slot}
            assert slot is not None
            flag, own_flag = slot * COLUMNS + column, slot * COLUMNS + SENDER
            self._flags[flag] = 1
            if held or is_new:  # what may be sent again; what is copied now, whose receiver may be gone meanwhile
                self._flags[own_flag] = 1
        start, memory = self._slots[slot]
        if is_new:
            torch.from_numpy(memory[:size]).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            with self._lock:
                self._flags[own_flag] = held
                if content is not None:
                    self._contents[content] = slot
        return Parcel(self.pid, self.file, flag, start, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))

    def _add_slot(self, size: int) -> int | None:
        slot, unit = len(self._slots), _page(size)
        start, length = _up(self._end, unit), _up(size, unit)
        if (slot + 1) * COLUMNS > FLAGS or start + length > MOST:
            return None
        self._end = start + length
        os.ftruncate(self.file, self._end)
        self._slots.append((start, _mapped(self.file, start, length)))
        return slot

    def release(self, sent: Any) -> None:
        """What was put, and held, has been answered."""
        if isinstance(sent, Parcel):
            self._flags[sent.flag // COLUMNS * COLUMNS + SENDER] = 0

    def forget(self, receiver: int) -> None:
        """The receiver is gone, and reads nothing any more but what is sent again."""
        column = self._columns.get(receiver, receiver)
        with self._lock:
            for slot in range(len(self._slots) if column < RECEIVERS else 0):
                self._flags[slot * COLUMNS + column] = 0

    def replace_receiver(self, receiver: int) -> None:
        """Another process has taken the place of a receiver that was killed. It has flags of its own, so that it makes
        no difference when it lets go of what was meant for the former.
        """
        self.forget(receiver)
        with self._lock:
            retired, self._columns[receiver] = self._columns.get(receiver), self._spare_columns.popleft()
            if retired is not None:
                self._spare_columns.append(retired)

    def get(self, sent: Parcel | torch.Tensor) -> torch.Tensor:
        """What a peer has put.

        Raises:
            OSError, ValueError: it did not, or this process may not read it.
        """
        if isinstance(sent, torch.Tensor):
            return sent
        peer = self._peers.get((sent.pid, sent.file)) or self._open(sent.pid, sent.file)
        dtype = getattr(torch, sent.dtype, None)
        if not isinstance(dtype, torch.dtype) or min(sent.shape, default=0) < 0 or not 0 <= sent.flag < FLAGS:
            raise ValueError(f"no tensor: {sent}")
        size = math.prod(sent.shape) * dtype.itemsize
        if sent.start not in peer.slots or len(peer.slots[sent.start]) < size:
            if not FLAGS <= sent.start <= os.fstat(peer.file).st_size - size:
                raise ValueError(f"beyond its memory: {size} bytes from {sent.start}")
            peer.slots[sent.start] = _mapped(peer.file, sent.start, _up(size, _page(size)))
        memory = peer.slots[sent.start][:size]
        weakref.finalize(memory, peer.flags.__setitem__, sent.flag, 0).atexit = False
        return torch.from_numpy(memory).view(dtype).view(sent.shape)

    def _open(self, pid: int, file: int) -> "_Peer":
        with self._lock:
            if (pid, file) not in self._peers:
                gone = [key for key in self._peers if not os.path.exists(f"/proc/{key[0]}")]
                for key in gone[:-GONE_KEPT]:
                    del self._peers[key]
                self._peers[pid, file] = _Peer(pid, file)
            return self._peers[pid, file]


class _Peer:
    """Another process's memory.

    Attributes:
        slots: by where they begin.
    """

    def __init__(self, pid: int, file: int) -> None:
        path = f"/proc/{pid:d}/fd/{file:d}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise ValueError(f"{path} is no memory of hvdtrain's")
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.file).atexit = False
        self.flags = mmap.mmap(self.file, FLAGS)
        self.slots: dict[int, np.ndarray[Any, Any]] = {}


def _page(size: int) -> int:
    return HUGE if size >= HUGE else mmap.PAGESIZE


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _mapped(file: int, start: int, length: int) -> "np.ndarray[Any, Any]":
    memory = mmap.mmap(file, length, offset=start)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
