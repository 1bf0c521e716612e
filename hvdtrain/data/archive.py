"""Reads files out of a folder, a zip or a tar (a tar of tars too) without extracting it. Archives are not trusted."""

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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hvdtrain.data import image
from hvdtrain.data.storage import on_all_cores
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import printable

MAX_MEMBERS = 5_000_000
MAX_HASHED_BYTES = 4 * 2**30  # the fingerprint of a larger tree covers names and sizes only
MAX_EXPANSION = 200  # unpacked bytes to packed bytes: images are compressed already
_TOO_LARGE = f"more than {MAX_EXPANSION} times its size, unpacked"

MAX_HEADER_BYTES = 2**16  # of a tar's header that says more of the next member: a long name, or its times
SAYS_MORE = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
MAX_NAME = 4096  # characters of a path

DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, ValueError,
    RuntimeError,  # an encrypted zip, or tarfile's recursion in headers that say more of headers that say more
)  # fmt: skip


class _NotRead(Exception):
    """An archive holds this, which only a malicious one does."""


class _Header(tarfile.TarInfo):
    """A member's header. tarfile reads headers that say more, long names for one, as long as they claim to be and all
    at once: a compressed megabyte can be a gigabyte of them.
    """

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> "_Header":
        header = super().frombuf(buf, encoding, errors)
        if header.type in SAYS_MORE and header.size > MAX_HEADER_BYTES:
            raise _NotRead(f"a header of {header.size:,} bytes, more than {MAX_HEADER_BYTES:,}")
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise _NotRead("a sparse file")
        return header

    def _proc_gnusparse_10(self, *_: Any) -> None:
        """The map of a sparse file in PAX format, which is as long as it claims to be, too."""
        raise _NotRead("a sparse file")


@dataclass(frozen=True)
class Member:
    """A regular file of a tree.

    Attributes:
        name: its path within the tree, with /.
        size: bytes.
        offset: where it begins in the archive; reading members in this order is fastest.
        path: the file itself, where the tree is a folder.
        handle: the archive library's object for it.
        is_sequential: whether the archive can be read quickly in its order only: a compressed tar.
    """

    name: str
    size: int
    offset: int
    tree: "Tree" = field(repr=False)
    path: Path | None = None
    handle: Any = None
    is_sequential: bool = False

    def read_bytes(self) -> bytes:
        """Its contents; see Tree.read."""
        return self.tree.read(self)

    def __str__(self) -> str:
        return printable(self.name)


class Tree:
    """The files of a folder or an archive.

    Attributes:
        members: its regular files, in the order of `offset`.
        passed_over: of a folder, what is no member: hidden files and folders, links that lead nowhere, and devices.
        fingerprint: a hash of all names and sizes, and of the contents up to MAX_HASHED_BYTES; 64 hex digits.

    Raises:
        UsageError: there is no folder or archive at the path.
        Failure: the archive is damaged, or holds what only a malicious one does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed_over: list[str] = []
        self._archive = cast(Any, None)  # a ZipFile or TarFile, where it is no folder
        fingerprint = hashlib.sha256()
        with self._errors_as_failures():
            if path.is_dir():
                self.members = self._folder_members()
            else:
                self._archive = _open(path)
                weakref.finalize(self, self._archive.close)  # members refer to the tree, which keeps the archive open
                self._most_unpacked = MAX_EXPANSION * path.stat().st_size + tarfile.RECORDSIZE  # which an empty tar has
                is_zip = isinstance(self._archive, zipfile.ZipFile)
                self.members = self._check_limits(self._zip_members() if is_zip else self._tar_members(self._archive))
            for member in self.members:
                fingerprint.update(f"{member.name}\0{member.size}\n".encode(errors="replace"))
            files = [member.path or path for member in self.members] if path.is_dir() else [path]
            if sum(file.stat().st_size for file in files) <= MAX_HASHED_BYTES:
                for _, content_digest in on_all_cores(file_digest, files):
                    fingerprint.update(content_digest)
        self.fingerprint = fingerprint.hexdigest()

    @contextmanager
    def _errors_as_failures(self, at: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Failure(f"cannot read '{error.filename or self.path}': {error.strerror or error}") from None
        except _NotRead as error:
            raise Failure(f"'{self.path}' holds {error}: not read") from None
        except DAMAGED as error:
            raise Failure(f"'{self.path}' is damaged{at}: {error}") from None

    def read(self, member: Member) -> bytes:
        """A member's contents. Several threads may call this at the same time, unless it is sequential.

        Raises:
            Failure: it cannot be read, is not as long as the archive says, or is too large.
        """
        if member.size > image.MAX_BYTES:
            raise Failure(f"'{self.path}': {member.name} has {member.size:,} bytes, too many for an image")
        with self._errors_as_failures(f" at {member.name}"):
            if member.path:
                return member.path.read_bytes()
            if isinstance(self._archive, zipfile.ZipFile):
                with self._archive.open(member.handle) as file:
                    content = file.read(member.size + 1)  # not all: it may unpack to more than it says
            elif member.is_sequential:
                content = self._archive.extractfile(member.handle).read()
            else:
                content = os.pread(self._archive.fileobj.fileno(), member.size, member.offset)
        if len(content) != member.size:
            raise Failure(f"'{self.path}' is cut off: {member.name} is not whole")
        return content

    def find(self, name: str) -> Member | None:
        """The first member of this file name, in any folder."""
        return next((member for member in self.members if member.name.split("/")[-1] == name), None)

    def members_of_tar(self, member: Member) -> list[Member]:
        """The files in a tar that is a member of this uncompressed tar; only headers are read."""
        end = member.offset + member.size
        with self._errors_as_failures(f" at {member.name}"), self.path.open("rb", buffering=0) as file:
            file.seek(member.offset)
            inner = self._check_limits(self._tar_members(tarfile.open(fileobj=file, mode="r:", tarinfo=_Header)))
            within = [one for one in inner if one.handle.offset < end]  # after one without an end come others
            if not within or within[-1].offset + within[-1].size > end:
                raise EOFError("it holds no files, or is cut off")
            return within

    def _check_limits(self, members: Iterable[Member]) -> list[Member]:
        """The members, by offset. _NotRead as soon as they are too many, or too large for their archive."""
        listed: list[Member] = []
        total = 0
        for member in members:
            listed.append(member)
            total += member.size + len(member.name)
            if total > self._most_unpacked:
                raise _NotRead(_TOO_LARGE)
            if len(listed) > MAX_MEMBERS:
                raise _NotRead(f"more than {MAX_MEMBERS:,} files")
        return sorted(listed, key=lambda member: member.offset)

    def _folder_members(self) -> list[Member]:
        members: list[Member] = []
        for root, folders, names in os.walk(self.path, onerror=_raise, followlinks=True):
            if any(Path(root).samefile(above) for above in Path(root).parents if self.path in (above, *above.parents)):
                raise Failure(f"'{root}' is a link to a folder that it is in")
            hidden = [name for name in folders if name.startswith(".")]
            folders[:] = sorted(set(folders) - set(hidden))
            for name in sorted([*names, *hidden]):
                path = Path(root, name)
                relative = path.relative_to(self.path).as_posix()
                if name.startswith(".") or not path.is_file():
                    self.passed_over.append(relative)
                else:
                    members.append(Member(relative, path.stat().st_size, len(members), self, path))
        return members

    def _zip_members(self) -> Iterator[Member]:
        for info in self._archive.infolist():
            name = _checked(info.filename)
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _NotRead(f"{info.filename!a}, a link or a device")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # which unpack without limit
                raise _NotRead(f"{info.filename!a}, not packed by deflate (unpack it, and give the folder)")
            if name and not info.is_dir():
                yield Member(name, info.file_size, info.header_offset, self, None, info)

    def _tar_members(self, archive: Any) -> Iterator[Member]:
        is_compressed = not isinstance(archive.fileobj, io.BufferedReader | io.FileIO)
        if is_compressed:
            archive.fileobj = _Decompressed(archive.fileobj, self._most_unpacked)
        for number, info in enumerate(iter(archive.next, None)):
            archive.members.clear()  # each header is forgotten as soon as it was looked at
            info.pax_headers = {}
            if number == MAX_MEMBERS:
                raise _NotRead(f"more than {MAX_MEMBERS:,} files and folders")
            name = _checked(info.name)
            if not info.isfile() and not info.isdir():
                raise _NotRead(f"{info.name!a}, a link or a device")
            if name and info.isfile():
                yield Member(name, info.size, info.offset_data, self, None, info, is_compressed)
        while is_compressed and archive.fileobj.read(2**20):
            pass  # reading to the end has the decompressor verify its checksum


def _open(path: Path) -> zipfile.ZipFile | tarfile.TarFile:
    if not path.exists():
        raise UsageError(f"there is no file or folder '{path}'")
    if zipfile.is_zipfile(path):
        return zipfile.ZipFile(path)
    try:
        return tarfile.open(path, tarinfo=_Header)
    except tarfile.ReadError:
        raise UsageError(f"'{path}' is neither a folder nor a zip or tar archive, or it is damaged") from None


def _checked(name: str) -> str:
    """A member's name; empty for a hidden file, one in a hidden folder, and what macOS adds to archives.

    _NotRead for a name that would lead out of the folder into which an archive is unpacked.
    """
    if len(name) > MAX_NAME:
        raise _NotRead(f"a name of {len(name):,} characters")
    parts = name.replace("\\", "/").split("/")
    if parts[0] == "" or ".." in parts or ":" in parts[0] or "\0" in name:
        raise _NotRead(f"{name!a}, which leads out of the archive")
    name = name.removeprefix("./")
    is_hidden = any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
    return "" if is_hidden else name


def file_digest(path: Path) -> bytes:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _raise(error: OSError) -> None:
    raise error


class _Decompressed:
    """What a compressed tar holds, members or not. _NotRead where that is more than `most` bytes."""

    def __init__(self, file: Any, most: int) -> None:
        self.file, self.most = file, most
        self.tell, self.seekable, self.close = file.tell, file.seekable, file.close

    def seek(self, position: int) -> int:
        if position > self.most:  # what lies before it would be decompressed
            raise _NotRead(_TOO_LARGE)
        return self.file.seek(position)

    def read(self, size: int) -> bytes:
        content = self.file.read(size)
        if self.tell() > self.most:
            raise _NotRead(_TOO_LARGE)
        return content
