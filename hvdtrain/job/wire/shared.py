"""Tensors from one process of this host to another, by memory that both share.

The wire carries where a tensor lies. To copy from process to process by a system call
(process_vm_readv, as TensorPipe does) takes two to three times as long as to copy memory. So a
tensor is copied once, into a slot of memory that its receiver has mapped too. The receiver gets
that memory itself, until it lets go of it: a byte for each slot and receiver says whether the slot
is in use. The sender sets the byte; the receiver clears it when its tensor is garbage.

A tensor that is sent often, as a server's weights are, can stay in a slot (`SharedMemory.keep`).
Then nothing is copied to send it.

The memory is a memfd: it has no name that could be left behind, and is gone with the last process
that has it. A peer opens it as /proc/PID/fd/N, which the system grants to processes of the same
user alone.
"""

import math
import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hvdtrain.base.system.mapping import map_file, prefer_huge_pages
from hvdtrain.base.system.memory import count_memory_of_others
from hvdtrain.base.world.place import World
from hvdtrain.job.wire.heartbeat import wait_for_ranks, while_served
from hvdtrain.job.wire.messages import INLINE_BYTES

if TYPE_CHECKING:
    from torch.distributed import Store

# Bytes of the slots that tensors are copied into to be sent: more than twice what is under way, see
# buckets.send_queue.UNDER_WAY.
MOST = 128 * 2**20
HUGE = 2**21  # bytes of a huge page, where larger slots begin
GONE_KEPT = 2  # processes that have ended whose memory stays: an answer may be on its way
FLAGS = 2**20  # the first bytes of the memory: COLUMNS of each slot, a byte that is 1 while in use
COLUMNS = 64  # one for each receiver, the last one for the sender
RECEIVERS = SENDER = COLUMNS - 1  # tensors for further receivers travel in messages
_NAME = "hvdtrain"
_FREE = bytes(COLUMNS)
_UNREAD = bytes(RECEIVERS)


class Parcel(NamedTuple):
    """The place of a tensor in the sender's memory.

    Attributes:
        pid: the process that owns the memory.
        file: the file descriptor of the memfd, in that process.
        flag: which byte to clear.
        start: the byte of the file at which the tensor begins.
        dtype: torch's name of the dtype, without `torch.`.
        shape: the tensor's shape.
    """

    pid: int
    file: int
    flag: int
    start: int
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class _Slot:
    """A piece of this process's memory that holds one tensor at a time.

    Attributes:
        number: the slot's number, from 0.
        start: the byte of the file at which it begins.
        memory: its bytes.
    """

    number: int
    start: int
    memory: "np.ndarray[Any, Any]"

    def flag(self, column: int) -> int:
        """Returns which byte says that the slot is in use by this column's receiver."""
        return self.number * COLUMNS + column


class SharedMemory:
    """The memory that this process sends tensors in, and its peers' memory. Threads may share it.

    Attributes:
        on: whether tensors go through memory; otherwise they are passed on as they are.
        pid, file: where peers find the memory: see Parcel.
    """

    def __init__(self) -> None:
        self.on = False
        self.pid = os.getpid()
        self.file = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self.file).atexit = False
        os.ftruncate(self.file, FLAGS)
        self._flags = mmap.mmap(self.file, FLAGS)
        self._slots: list[_Slot] = []  # by number
        self._passing: list[_Slot] = []  # of these, the slots of `put`
        self._kept: dict[int, _Slot] = {}  # the slot of each tensor that is kept, by its address
        # Slots of tensors that were kept. Receivers may still have them.
        self._given_up: deque[_Slot] = deque()
        self._end = FLAGS
        self._peers: dict[tuple[int, int], _Peer] = {}
        # The columns of receivers that came in another's place; a receiver's column is its number
        # otherwise.
        self._columns: dict[int, int] = {}
        # Columns for such receivers. Columns that were given up are used last.
        self._spare_columns = deque(reversed(range(RECEIVERS // 2, RECEIVERS)))
        self._lock = threading.Lock()

    @while_served()
    def join(self, world: World, store: "Store", timeout: float) -> None:
        """Turns the memory on, if all ranks can open the memory of those at the other end.

        The memory stays off where the job is on several hosts, and with HVDTRAIN_OVER_TCP.

        Args:
            world: where this rank is.
            store: the store that all ranks share.
            timeout: seconds after which a silent rank is lost.
        """
        if not world.is_local or os.environ.get("HVDTRAIN_OVER_TCP"):
            return
        others = [rank for rank in range(world.size) if (rank < world.servers) != world.is_server]
        store.set(f"memory/{world.rank}", f"{self.pid} {self.file}")
        wait_for_ranks(store, {rank: f"memory/{rank}" for rank in others}, timeout)
        try:
            for rank in others:
                pid, file = store.get(f"memory/{rank}").split()
                self._open(int(pid), int(file))
        except (OSError, ValueError):
            store.set("memory/not_shared", "")
        store.set(f"memory/{world.rank}/opened", "")
        wait_for_ranks(store, {rank: f"memory/{rank}/opened" for rank in others}, timeout)
        self.on = not store.check(["memory/not_shared"])

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a CPU tensor that `put` sends without copying it.

        Receivers only read it. Before the caller changes it, `is_read` tells whether one may be
        reading. The memory is used again when this process and all receivers have let go of it.
        Where the memory is off, or full, the copy is in memory of this process.
        """
        slot = None
        if self.on and tensor.nbytes > INLINE_BYTES:
            with self._lock:
                slot = self._free_kept_slot(tensor.nbytes)
                if slot is not None:
                    self._flags[slot.flag(SENDER)] = 1
        if slot is None:
            return tensor.clone()
        memory = slot.memory[: tensor.nbytes]
        address = memory.ctypes.data
        self._kept[address] = slot
        weakref.finalize(memory, self._let_go, address, slot).atexit = False
        kept = torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)
        return kept.copy_(tensor)

    def _let_go(self, address: int, slot: _Slot) -> None:
        """Takes note that a tensor that was kept is garbage.

        Any thread may find that out, also one that holds the lock.
        """
        del self._kept[address]
        self._flags[slot.flag(SENDER)] = 0
        self._given_up.append(slot)

    def is_read(self, tensor: torch.Tensor) -> bool:
        """Returns whether a receiver that was sent this tensor may still read it.

        True where nobody can tell: the tensor is not kept here.
        """
        slot = self._kept.get(tensor.data_ptr())
        return slot is None or self._flags[slot.flag(0) : slot.flag(RECEIVERS)] != _UNREAD

    def put(self, tensor: torch.Tensor, receiver: int, held: bool = False) -> Any:
        """Copies a CPU tensor to where the receiver may read it.

        A tensor that is kept is not copied, unless the receiver was sent it before and has not let
        go of it.

        Args:
            tensor: the tensor to send.
            receiver: a number of the caller's.
            held: the copy stays there until `release`, even when the receiver has let go of it. Not
                for tensors that are kept.

        Returns:
            The Parcel to send; the tensor where it is small, or no memory is left.
        """
        if not self.on or tensor.nbytes <= INLINE_BYTES:
            return tensor
        if receiver >= RECEIVERS:
            return self._for_message(tensor)
        with self._lock:
            column = self._columns.get(receiver, receiver)
            slot = self._kept.get(tensor.data_ptr())
            is_there = slot is not None and not self._flags[slot.flag(column)]
            if not is_there:
                slot = self._free_passing_slot(tensor.nbytes)
            if slot is None:
                return self._for_message(tensor)
            self._flags[slot.flag(column)] = 1
            if not is_there:  # the slot stays in use should the receiver be gone meanwhile
                self._flags[slot.flag(SENDER)] = 1
        if not is_there:
            memory = torch.from_numpy(slot.memory[: tensor.nbytes])
            memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._flags[slot.flag(SENDER)] = held
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = list(tensor.shape)
        return Parcel(self.pid, self.file, slot.flag(column), slot.start, dtype, shape)

    def _for_message(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor for a message: of a kept one a copy, since no flag says who reads it."""
        return tensor.clone() if tensor.data_ptr() in self._kept else tensor

    def _free_passing_slot(self, size: int) -> _Slot | None:
        """Returns a slot that nobody uses for so many bytes; None where no memory is left.

        The first slot that fits is taken, so that few are in use, and those in the processor's
        caches.
        """
        for slot in self._passing:
            if self._is_free(slot, size):
                return slot
        used = sum(len(slot.memory) for slot in self._passing)
        if used + _up(size, _page(size)) > MOST:
            return None
        added = self._add_slot(size)
        if added is not None:
            self._passing.append(added)
        return added

    def _free_kept_slot(self, size: int) -> _Slot | None:
        """Returns a slot for a tensor of so many bytes; None where there are too many slots."""
        for _ in range(len(self._given_up)):
            slot = self._given_up.popleft()
            if self._is_free(slot, size):
                return slot
            self._given_up.append(slot)
        return self._add_slot(size)

    def _is_free(self, slot: _Slot, size: int) -> bool:
        """Returns whether nobody uses a slot, and it fits so many bytes."""
        fits = size <= len(slot.memory) <= 2 * size
        return fits and self._flags[slot.flag(0) : slot.flag(COLUMNS)] == _FREE

    def _add_slot(self, size: int) -> _Slot | None:
        number = len(self._slots)
        unit = _page(size)
        start = _up(self._end, unit)
        length = _up(size, unit)
        if (number + 1) * COLUMNS > FLAGS:
            return None
        self._end = start + length
        os.ftruncate(self.file, self._end)
        slot = _Slot(number, start, _mapped(self.file, start, length))
        self._slots.append(slot)
        return slot

    def release(self, sent: Any) -> None:
        """Lets go of what `put` has held: it was answered."""
        if isinstance(sent, Parcel):
            self._flags[sent.flag // COLUMNS * COLUMNS + SENDER] = 0

    def forget(self, receiver: int) -> None:
        """Forgets a receiver that is gone: it reads nothing any more but what is sent again."""
        column = self._columns.get(receiver, receiver)
        if column >= RECEIVERS:
            return
        with self._lock:
            for slot in self._slots:
                self._flags[slot.flag(column)] = 0

    def replace_receiver(self, receiver: int) -> None:
        """Gives a new column to a process in the place of a receiver that was killed.

        So it makes no difference when the new process lets go of what was meant for the former one.
        """
        self.forget(receiver)
        with self._lock:
            retired = self._columns.get(receiver)
            self._columns[receiver] = self._spare_columns.popleft()
            if retired is not None:
                self._spare_columns.append(retired)

    def get(self, sent: Parcel | torch.Tensor) -> torch.Tensor:
        """Returns what a peer has put.

        Raises:
            OSError, ValueError: the peer did not put it, or this process may not read it.
        """
        if isinstance(sent, torch.Tensor):
            return sent
        peer = self._peers.get((sent.pid, sent.file)) or self._open(sent.pid, sent.file)
        dtype = getattr(torch, sent.dtype, None)
        if (
            not isinstance(dtype, torch.dtype)
            or min(sent.shape, default=0) < 0
            or not 0 <= sent.flag < FLAGS
        ):
            raise ValueError(f"no tensor: {sent}")
        size = math.prod(sent.shape) * dtype.itemsize
        memory = peer.bytes_at(sent.start, size)
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
        slots: the slots that were mapped, by where they begin.
    """

    def __init__(self, pid: int, file: int) -> None:
        path = f"/proc/{pid:d}/fd/{file:d}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise ValueError(f"{path} is no memory of hvdtrain's")
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.file).atexit = False
        self.flags = mmap.mmap(self.file, FLAGS)
        self.slots: dict[int, np.ndarray[Any, Any]] = {}

    def bytes_at(self, start: int, size: int) -> "np.ndarray[Any, Any]":
        """Returns so many bytes of the memory.

        Raises:
            ValueError: they lie beyond it.
        """
        slot = self.slots.get(start)
        if slot is None or len(slot) < size:
            if not FLAGS <= start <= os.fstat(self.file).st_size - size:
                raise ValueError(f"beyond its memory: {size} bytes from {start}")
            slot = _mapped(self.file, start, _up(size, _page(size)))
            self.slots[start] = slot
            count_memory_of_others(_up(size, mmap.PAGESIZE))
        return slot[:size]


def _page(size: int) -> int:
    return HUGE if size >= HUGE else mmap.PAGESIZE


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _mapped(file: int, start: int, length: int) -> "np.ndarray[Any, Any]":
    memory = map_file(file, start, length)
    prefer_huge_pages(memory)
    return np.frombuffer(memoryview(memory), np.uint8)
