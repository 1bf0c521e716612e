"""Reads files out of a folder, a zip or a tar (a tar of tars too) without extracting anything. Nothing is trusted."""

import hashlib
import io
import lzma
import os
import stat
import tarfile
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hvdtrain.data.select import Item
from hvdtrain.errors import Failure, UsageError

MOST_MEMBERS = 5_000_000
LARGEST_FILE = 128 * 2**20  # bytes of one file that is read; a picture has a few MB at most
HASHED = 4 * 2**30  # bytes: of more, names and sizes stand for the contents
LARGEST_RATIO = 200  # of what comes out to what went in: pictures are compressed already

BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, ValueError)


@dataclass(frozen=True)
class Member:
    """A regular file.

    Attributes:
        name: its path within the tree, with /.
        size: bytes.
        place: where it begins in the archive: reading in this order is fastest.
        path: the file itself, where the tree is a folder.
    """

    name: str
    size: int
    place: int
    tree: "Tree" = field(repr=False)
    path: Path | None = None
    handle: Any = None

    def read(self) -> bytes:
        """Its contents; see Tree.read."""
        return self.tree.read(self)


class Tree:
    """The files of a folder or an archive.

    Attributes:
        members: its regular files, in the order of `place`.
        fingerprint: 64 hex digits over every name and size, and over the contents (a zip's checksums) up to HASHED.

    Raises:
        UsageError: there is nothing of a known kind at the path.
        Failure: the archive is broken, or holds what none that is meant well holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive = cast(Any, None)  # a ZipFile or TarFile, where it is no folder
        try:
            if path.is_dir():
                self.members = self._files()
            elif not path.exists():
                raise UsageError(f"there is no file or folder '{path}'")
            elif zipfile.is_zipfile(path):
                self.members = self._checked(self._zipped(self._held(zipfile.ZipFile(path))))
            elif tarfile.is_tarfile(path):
                self.members = self._checked(self._tarred(self._held(tarfile.open(path)), 0))
                while self.is_sequential and self._archive.fileobj.read(2**20):
                    pass  # the checksum of what was decompressed comes last
            else:
                raise UsageError(f"'{path}' is neither a folder nor a zip or tar archive, or it is damaged")
        except OSError as error:
            raise Failure(f"cannot read '{error.filename or path}': {error.strerror or error}") from None
        except BROKEN as error:
            raise Failure(f"'{path}' is damaged: {error}") from None
        listed = hashlib.sha256()
        for member in self.members:
            listed.update(
                f"{member.name}\0{member.size}\0{getattr(member.handle, 'CRC', '')}\n".encode(errors="replace")
            )
        try:
            for content in self._digests():
                listed.update(content)
        except OSError as error:
            raise Failure(f"cannot read '{error.filename or path}': {error.strerror or error}") from None
        self.fingerprint = listed.hexdigest()

    def _digests(self) -> Iterator[bytes]:
        """Of the contents, as far as the list of members does not tell them."""
        if self.path.is_file():
            if isinstance(self._archive, tarfile.TarFile) and self.path.stat().st_size <= HASHED:
                yield digest(self.path)
        elif sum(member.size for member in self.members) <= HASHED:
            with ThreadPoolExecutor(4) as pool:
                yield from pool.map(digest, [member.path for member in self.members if member.path])

    def _held(self, archive: Any) -> Any:
        self._archive = archive
        weakref.finalize(self, archive.close)  # open for as long as any member is needed
        return archive

    @property
    def is_sequential(self) -> bool:
        """Whether what comes earlier in the archive is costly to read later: a compressed tar."""
        return isinstance(self._archive, tarfile.TarFile) and not _is_plain(self._archive)

    def read(self, member: Member) -> bytes:
        """A member's contents. Any thread may call this, but in a sequential tree one at a time.

        Raises:
            Failure: it cannot be read, is shorter or larger than the archive says, or too large.
        """
        if member.size > LARGEST_FILE:
            raise Failure(f"'{self.path}': {member.name} has {member.size:,} bytes, too many for an image")
        try:
            if member.path:
                return member.path.read_bytes()
            if isinstance(self._archive, zipfile.ZipFile):
                return self._archive.read(member.handle)
            if self.is_sequential:
                file = self._archive.extractfile(member.handle)
                content = file.read()
            else:
                content = os.pread(self._archive.fileobj.fileno(), member.size, member.place)
        except OSError as error:
            raise Failure(f"cannot read '{member.path or self.path}': {error.strerror or error}") from None
        except (*BROKEN, RuntimeError) as error:  # RuntimeError: encrypted
            raise Failure(f"'{self.path}' is damaged at {member.name}: {error}") from None
        if len(content) != member.size:
            raise Failure(f"'{self.path}' is cut off: {member.name} is not whole")
        return content

    def within(self, member: Member) -> list[Member]:
        """The files in a tar that is a member of this uncompressed tar. Only their headers are read."""
        try:
            inner = tarfile.open(fileobj=_Window(self._archive.fileobj.fileno(), member.place, member.size), mode="r:")
            return self._checked(self._tarred(inner, member.place))
        except BROKEN as error:
            raise Failure(f"'{self.path}' is damaged at {member.name}: {error}") from None

    def _checked(self, members: Iterable[Member]) -> list[Member]:
        """The members; Failure as soon as they are too many, or too large for the archive that they are in."""
        found: list[Member] = []
        total, most = 0, LARGEST_RATIO * self.path.stat().st_size
        for member in members:
            found.append(member)
            total += member.size
            if total > most:
                raise Failure(f"'{self.path}' would be more than {LARGEST_RATIO} times as large unpacked: not read")
            if len(found) > MOST_MEMBERS:
                raise Failure(f"'{self.path}' holds more than {MOST_MEMBERS:,} files: not read")
        return sorted(found, key=lambda member: member.place)

    def _files(self) -> list[Member]:
        members: list[Member] = []
        for root, folders, names in os.walk(self.path, onerror=_raise, followlinks=True):
            if any(Path(root).samefile(above) for above in Path(root).parents if self.path in (above, *above.parents)):
                raise Failure(f"'{root}' is a link to a folder that it is in")
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(root, name)
                if not name.startswith(".") and path.is_file():
                    relative = path.relative_to(self.path).as_posix()
                    members.append(Member(relative, path.stat().st_size, len(members), self, path))
        return members

    def _zipped(self, archive: zipfile.ZipFile) -> Iterator[Member]:
        for info in archive.infolist():
            self._check_name(info.filename)
            name = info.filename.removeprefix("./")
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise Failure(f"'{self.path}' holds {info.filename!a}, a link or a device: not read")
            if not info.is_dir() and not _is_hidden(name):
                yield Member(name, info.file_size, info.header_offset, self, None, info)

    def _tarred(self, archive: tarfile.TarFile, base: int) -> Iterator[Member]:
        for info in archive:
            self._check_name(info.name)
            name = info.name.removeprefix("./")
            if not info.isfile() and not info.isdir():
                raise Failure(f"'{self.path}' holds {info.name!a}, a link or a device: not read")
            if info.isfile() and not _is_hidden(name):
                yield Member(name, info.size, base + info.offset_data, self, None, info)

    def _check_name(self, name: str) -> None:
        """Failure for a name that would lead out of the folder that an archive is unpacked into."""
        parts = name.replace("\\", "/").split("/")
        if parts[0] == "" or ".." in parts or ":" in parts[0] or "\0" in name:
            raise Failure(f"'{self.path}' holds {name!a}, which leads out of the archive: not read")


def contents(items: Iterable[Item]) -> Iterator[bytes | Member]:
    """The contents of items whose handles are members; members themselves where any thread may read them."""
    for item in items:
        yield item.handle.read() if item.handle.tree.is_sequential else item.handle


def _is_plain(archive: tarfile.TarFile) -> bool:
    return isinstance(archive.fileobj, io.BufferedReader)


def digest(path: Path) -> bytes:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _is_hidden(name: str) -> bool:
    """What folders hide, and what macOS puts beside it."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _raise(error: OSError) -> None:
    raise error


class _Window(io.RawIOBase):
    """A part of a file, read without moving the file's own position."""

    def __init__(self, file: int, start: int, size: int) -> None:
        self.file, self.start, self.size, self.at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        content = os.pread(self.file, max(0, min(len(buffer), self.size - self.at)), self.start + self.at)
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)
