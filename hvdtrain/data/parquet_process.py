"""A reader process for Parquet files, with a limit of memory.

Files may come from anybody. A file of a few kB can unpack to gigabytes, and pyarrow ends the
process for some damaged files. In a process apart both become one line of an error. The two
processes exchange msgspec messages and the bytes of images: nothing is unpickled.
"""

import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.system.memory import keep_memory
from hvdtrain.data.filesystems import reason_of
from hvdtrain.data.parquet_files import (
    Listing,
    ParquetFile,
    bounds_of,
    check_sizes,
    list_dataset,
    places_of,
)

MEMORY = 2**31  # bytes that the process may take; Python and pyarrow take some 150 MB of them
# Row groups that are read at the same time, if they have together at most AT_ONCE_BYTES.
AT_ONCE = 4
AT_ONCE_BYTES = 2**28
MAX_ANSWER = 2**30
ENDS_S = 5.0  # within which a process that closes its connections has ended
STACK = 2**20  # bytes of a thread's stack, which count against MEMORY


class ListDataset(msgspec.Struct, tag=True):
    """Asks for the listing of the Parquet files at a URL or in a folder.

    `Read` refers to these files from then on.

    Attributes:
        url: The URL or folder.
        label: The column of classes; empty to find it.
    """

    url: str
    label: str


class Read(msgspec.Struct, tag=True):
    """Asks for the images of a row group.

    Attributes:
        file: The index of the file in `Listing.files`.
        group: The index of the row group in the file.
        local: The path of a local copy; None if the file is read from its file system.
    """

    file: int
    group: int
    local: str | None


class Places(msgspec.Struct, tag=True):
    """Answer to `Read`: the offsets in the local file at which each image begins and ends.

    They are [images, 2] int64, as bytes.
    """

    places: bytes


class Images(msgspec.Struct, tag=True):
    """Answer to `Read`: the lengths of the images, added up. The images follow this message.

    The ends are [images] int64, as bytes.
    """

    ends: bytes


class Problem(msgspec.Struct, tag=True):
    """Answer to a request that failed: the line of a UsageError or of a Failure."""

    text: str
    is_usage: bool


class InFile(NamedTuple):
    """Images of an uncompressed local file: where each begins and ends, [images, 2] int64."""

    path: Path
    places: np.ndarray

    def image(self, row: int) -> bytes:
        """Reads one encoded image."""
        with self.path.open("rb") as opened:
            start, end = self.places[row].tolist()
            return os.pread(opened.fileno(), end - start, start)


class ImagesInMemory(NamedTuple):
    """Images in memory, concatenated: where each ends, [images] int64, and all bytes."""

    ends: np.ndarray
    images: bytearray

    def image(self, row: int) -> bytes:
        """Returns one encoded image."""
        start = self.ends[row - 1] if row else 0
        return bytes(memoryview(self.images)[start : self.ends[row]])


_REQUESTS = msgspec.msgpack.Decoder(ListDataset | Read)
_ANSWERS = msgspec.msgpack.Decoder(Listing | Places | Images | Problem)
_readers: "weakref.WeakSet[ParquetReader]" = weakref.WeakSet()


class ParquetReader:
    """A process that reads one data set.

    The process ends when this object is garbage-collected, or when this process ends.

    Args:
        url: The URL or folder.
        label: The column of classes; empty to find it.

    Attributes:
        listing: The classes, files and labels of the data set.

    Raises:
        UsageError: There is no data set at the URL, or it cannot be read.
    """

    def __init__(self, url: str, label: str = "") -> None:
        pairs = [socket.socketpair() for _ in range(AT_ONCE)]
        descriptors = [inner.fileno() for _, inner in pairs]
        arguments = [sys.executable, "-Pm", __name__, str(MEMORY), *map(str, descriptors)]
        # Arrow's other memory pools take memory beforehand.
        environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}
        # A library may print something as it ends the process. The user reads one line instead.
        self._process = subprocess.Popen(
            arguments,
            pass_fds=descriptors,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _, inner in pairs:
            inner.close()
        connections = [Connection(outer.detach()) for outer, _ in pairs]
        self._close = weakref.finalize(self, _end, self._process, connections)
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._free.put(connections[0])
        listing, _ = self._ask(ListDataset(url, label), url)
        assert isinstance(listing, Listing)
        self.listing = listing
        groups = chain.from_iterable(file.groups for file in listing.files)
        largest = max(group.unpacked for group in groups)
        for connection in connections[1 : AT_ONCE_BYTES // max(1, largest)]:
            self._free.put(connection)
        _readers.add(self)

    def read(self, file: int, group: int, local: Path | None) -> InFile | ImagesInMemory:
        """Reads the images of a row group.

        Args:
            file: The index of the file in `listing.files`.
            group: The index of the row group in the file.
            local: The path of a local copy; None if the file is read from its file system.

        Raises:
            Failure: The images cannot be read.
        """
        path = self.listing.files[file].path
        answer, images = self._ask(Read(file, group, str(local) if local else None), path)
        if local and isinstance(answer, Places):
            return InFile(local, np.frombuffer(answer.places, np.int64).reshape(-1, 2))
        assert isinstance(answer, Images)
        return ImagesInMemory(np.frombuffer(answer.ends, np.int64), images)

    def _ask(
        self, request: ListDataset | Read, what: str
    ) -> tuple[Listing | Places | Images, bytearray]:
        """Sends a request over a free connection; returns the answer and the images that follow.

        Args:
            request: The message.
            what: The URL or path to name in an error.
        """
        connection = self._free.get()
        try:
            connection.send_bytes(msgspec.msgpack.encode(request))
            answer = _ANSWERS.decode(connection.recv_bytes(MAX_ANSWER))
            images = bytearray()
            if isinstance(answer, Images):
                images = _receive(connection, answer)
        except (OSError, EOFError):
            raise self._error_of_end(request, what) from None
        finally:
            self._free.put(connection)
        if isinstance(answer, Problem):
            raise (UsageError if answer.is_usage else Failure)(answer.text)
        return answer, images

    def _error_of_end(self, request: ListDataset | Read, what: str) -> UsageError | Failure:
        """Returns the error for a process that has ended, or that sent no valid answer."""
        try:
            code = self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        error = UsageError if isinstance(request, ListDataset) else Failure
        return error(
            f"{what} cannot be read as Parquet: a file is damaged, and has ended what read it "
            f"({how})"
        )

    def cpu_s(self) -> float:
        """Returns the process's user and system time in seconds; 0 once it has ended."""
        import psutil

        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)


def cpu_s() -> float:
    """Returns the user and system time in seconds of all reader processes of this process."""
    return sum(reader.cpu_s() for reader in _readers)


def _receive(connection: Connection, answer: Images) -> bytearray:
    """Receives the images that follow a message."""
    ends = np.frombuffer(answer.ends, np.int64)
    images = bytearray(int(ends[-1]) if len(ends) else 0)
    filled = 0
    while filled < len(images):
        filled += connection.recv_bytes_into(images, filled)
    return images


def _end(process: "subprocess.Popen[bytes]", connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()
    process.kill()
    process.wait()


class _Files:
    """The files that the reader process has listed."""

    def __init__(self) -> None:
        self.files: list[ParquetFile] = []

    def answer(self, connection: Connection) -> None:
        """Receives one request and answers it. Raises EOFError once the other process has ended."""
        request = _REQUESTS.decode(connection.recv_bytes())
        images: list[Any] = []
        try:
            answer: Any
            if isinstance(request, ListDataset):
                answer, self.files = list_dataset(request.url, request.label)
            else:
                answer, images = self._read(request)
            encoded = msgspec.msgpack.encode(answer)
        except UsageError as error:
            encoded = msgspec.msgpack.encode(Problem(str(error), True))
        except Exception as error:  # pyarrow and each fsspec file system have errors of their own
            encoded = msgspec.msgpack.encode(Problem(reason_of(error), False))
        connection.send_bytes(encoded)
        for batch in images:
            connection.send_bytes(batch)

    def _read(self, request: Read) -> tuple[Places | Images, list[Any]]:
        """Reads a row group; returns the answer and batches of images to send after it."""
        file = self.files[request.file]
        group = file.groups[request.group]
        batches = file.read(request.group, request.local or file.open())
        bounds = [bounds_of(batch) for batch in batches]
        lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(ends) for ends, _ in bounds)])
        check_sizes(lengths)
        if request.local and group.is_plain:
            places = places_of(Path(request.local), group, batches)
            if places is not None:
                return Places(places.tobytes()), []
        images = [content[ends[0] : ends[-1]] for ends, content in bounds if ends[-1] > ends[0]]
        return Images(np.cumsum(lengths).tobytes()), images


def _serve(files: _Files, connection: Connection) -> None:
    """Answers requests until the other process has ended, then ends this one."""
    try:
        while True:
            files.answer(connection)
    finally:
        os._exit(0)


def _main(memory: str, *descriptors: str) -> None:
    # Imported before memory is limited: a refusal during the import would be an ImportError.
    import pyarrow.parquet  # noqa: F401

    # The other process goes on for a while after these signals, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The memory of one row group is used again for the next: new pages cost more than the copy.
    keep_memory()
    threading.stack_size(STACK)
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files = _Files()
    first, *others = [Connection(int(descriptor)) for descriptor in descriptors]
    for connection in others:
        threading.Thread(target=_serve, args=(files, connection), daemon=True).start()
    _serve(files, first)


if __name__ == "__main__":
    _main(*sys.argv[1:])
