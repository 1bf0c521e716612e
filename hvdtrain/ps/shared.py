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

from hvdtrain.ps.messages import INLINE_BYTES
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store

MOST = 128 * 2**20  # bytes of a process's slots: more than twice what is under way, see exchange.UNDER_WAY
HUGE = 2**21  # bytes of a huge page, where larger slots begin
GONE_KEPT = 2  # processes that have ended whose memory stays: an answer of one may still be on its way
RECEIVERS = 64  # of one process; others get their tensors in messages
FLAGS = 2**16  # the first bytes: RECEIVERS of each slot
_NAME = "hvdtrain"


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
    """

    def __init__(self) -> None:
        self.on, self.file = False, -1
        self._slots: list[tuple[int, np.ndarray[Any, Any]]] = []  # where each begins, and its bytes
        self._contents: dict[object, int] = {}  # what lies where: see put
        self._end = FLAGS
        self._peers: dict[tuple[int, int], _Peer] = {}
        self._held: set[int] = set()  # slots that may be sent again
        self._filling: set[int] = set()  # slots that are being copied to, whose receivers may be gone meanwhile
        self._columns: dict[int, int] = {}  # receiver -> which of the flags of a slot are its, where not of its number
        self._left: deque[int] = deque()  # columns of receivers that were killed
        self._lock = threading.Lock()

    def join(self, world: World, store: "Store", patience: float) -> None:
        """Find out with the ranks at the other end whether all can open each other's memory: it is on, if so.

        Not where the job is on several hosts, nor with HVDTRAIN_OVER_TCP.

        Args:
            patience: seconds that this may take.
        """
        if not world.is_local or os.environ.get("HVDTRAIN_OVER_TCP"):
            return
        self._begin()
        others = [rank for rank in range(world.size) if (rank < world.servers) != world.is_server]
        store.set(f"memory/{world.rank}", f"{self._pid} {self.file}")
        store.wait([f"memory/{rank}" for rank in others], timedelta(seconds=patience))
        try:
            for rank in others:
                self._open(*map(int, store.get(f"memory/{rank}").split()))
        except (OSError, ValueError):
            store.set("memory/not_shared", "")
        store.set(f"memory/{world.rank}/opened", "")
        store.wait([f"memory/{rank}/opened" for rank in others], timedelta(seconds=patience))
        self.on = not store.check(["memory/not_shared"])

    def join_again(self) -> None:
        """Be on, in place of a process that was killed: who knew its memory will get to know this one's."""
        self._begin()
        self.on = True

    def _begin(self) -> None:
        self._pid, self.file = os.getpid(), os.memfd_create(_NAME)
        os.ftruncate(self.file, FLAGS)
        self._flags = mmap.mmap(self.file, FLAGS)

    def put(self, tensor: torch.Tensor, receiver: int, content: object = None, held: bool = False) -> Any:
        """Copy a CPU tensor to where the receiver, a number of the caller's, may read it.

        Args:
            content: equal for equal tensors that receivers only read: if it lies there already, nothing is copied.
            held: what lies there stays, until `release`, even when the receiver has let go of it.

        Returns:
            the Parcel to send; the tensor itself where it is small, or no memory is left.
        """
        if not self.takes(tensor) or receiver >= RECEIVERS:
            return tensor
        with self._lock:
            slot = self._contents.get(content)
            column = self._columns.get(receiver, receiver)
            is_there = slot is not None and not self._flags[slot * RECEIVERS + column]
            if not is_there:
                slot = self._free(tensor.nbytes)
            if slot is None:
                return tensor
            flag = slot * RECEIVERS + column
            self._flags[flag] = 1
            if held:
                self._held.add(slot)
            if not is_there:
                self._filling.add(slot)
        start, memory = self._slots[slot]
        if not is_there:
            torch.from_numpy(memory[: tensor.nbytes]).view(tensor.dtype).view(tensor.shape).copy_(tensor)
            with self._lock:
                self._filling.discard(slot)
                if content is not None:
                    self._contents[content] = slot
        name = str(tensor.dtype).removeprefix("torch.")
        return Parcel(self._pid, self.file, flag, start, name, list(tensor.shape))

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether it goes through this memory, if there is room."""
        return self.on and tensor.nbytes > INLINE_BYTES

    def release(self, sent: Any) -> None:
        """What was put, and held, has been answered."""
        if isinstance(sent, Parcel):
            with self._lock:
                self._held.discard(sent.flag // RECEIVERS)
                if sent.flag % RECEIVERS in self._left:
                    self._flags[sent.flag] = 0

    def forget(self, receiver: int) -> None:
        """The receiver is gone, and reads nothing any more."""
        with self._lock:
            self._clear(self._columns.get(receiver, receiver))

    def succeed(self, receiver: int) -> None:
        """Another process has taken the place of a receiver that was killed. It has flags of its own, so that it makes
        no difference when it lets go of what was meant for the former.
        """
        with self._lock:
            self._left.append(self._columns.get(receiver, receiver))
            unused = [column for column in range(RECEIVERS // 2, RECEIVERS) if column not in self._columns.values()]
            fresh = [column for column in unused if column not in self._left]
            self._columns[receiver] = fresh[-1] if fresh else next(column for column in self._left if column in unused)
            if not fresh:
                self._left.remove(self._columns[receiver])
            for column in self._left:
                self._clear(column)

    def _clear(self, column: int) -> None:
        for slot in range(len(self._slots) if column < RECEIVERS else 0):
            if slot not in self._held:
                self._flags[slot * RECEIVERS + column] = 0

    def get(self, sent: Parcel | torch.Tensor) -> torch.Tensor:
        """What a peer has put.

        Raises:
            OSError, ValueError: it did not, or this process may not read it.
        """
        if isinstance(sent, torch.Tensor):
            return sent
        return self._open(sent.pid, sent.file).get(sent)

    def _open(self, pid: int, file: int) -> "_Peer":
        with self._lock:
            if (pid, file) not in self._peers:
                gone = [key for key in self._peers if not os.path.exists(f"/proc/{key[0]}")]
                for key in gone[:-GONE_KEPT]:
                    del self._peers[key]
                self._peers[pid, file] = _Peer(pid, file)
            return self._peers[pid, file]

    def _free(self, size: int) -> int | None:
        """A slot for what is new: the first that fits, so that few are in use, and those in the processor's caches."""
        for slot, (_, memory) in enumerate(self._slots):
            if slot in self._held or slot in self._filling:
                continue
            if size <= len(memory) <= 2 * size and not any(self._flags[slot * RECEIVERS : (slot + 1) * RECEIVERS]):
                self._contents = {its: where for its, where in self._contents.items() if where != slot}
                return slot
        slot, unit = len(self._slots), _page(size)
        start, length = _up(self._end, unit), _up(size, unit)
        if (slot + 1) * RECEIVERS > FLAGS or start + length > MOST:
            return None
        self._end = start + length
        os.ftruncate(self.file, self._end)
        self._slots.append((start, _mapped(self.file, start, length)))
        return slot


class _Peer:
    """Another process's memory."""

    def __init__(self, pid: int, file: int) -> None:
        path = f"/proc/{pid:d}/fd/{file:d}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise ValueError(f"{path} is no memory of hvdtrain's")
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.file).atexit = False
        self.flags = mmap.mmap(self.file, FLAGS)
        self.slots: dict[int, np.ndarray[Any, Any]] = {}  # by where they begin

    def get(self, sent: Parcel) -> torch.Tensor:
        dtype = getattr(torch, sent.dtype, None)
        if not isinstance(dtype, torch.dtype) or min(sent.shape, default=0) < 0 or not 0 <= sent.flag < FLAGS:
            raise ValueError(f"no tensor: {sent}")
        size = math.prod(sent.shape) * dtype.itemsize
        if sent.start not in self.slots or len(self.slots[sent.start]) < size:
            if not FLAGS <= sent.start <= os.fstat(self.file).st_size - size:
                raise ValueError(f"beyond its memory: {sent}")
            self.slots[sent.start] = _mapped(self.file, sent.start, _up(size, _page(size)))
        memory = self.slots[sent.start][:size]
        weakref.finalize(memory, self.flags.__setitem__, sent.flag, 0).atexit = False
        return torch.from_numpy(memory).view(dtype).view(sent.shape)


def _page(size: int) -> int:
    return HUGE if size >= HUGE else mmap.PAGESIZE


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _mapped(file: int, start: int, length: int) -> "np.ndarray[Any, Any]":
    memory = mmap.mmap(file, length, offset=start)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
