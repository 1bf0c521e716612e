"""Trees of files: a folder, a zip or a tar (a tar of tars too), read without extracting it.

Archives are not trusted.
"""

import hashlib
import io
import lzma
import os
import re
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

from hvdtrain.base.config.untrusted import is_utf8
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import printable
from hvdtrain.data import image
from hvdtrain.data.names import is_passed_over
from hvdtrain.data.storage import on_all_cores

MAX_MEMBERS = 5_000_000
MAX_HASHED_BYTES = 4 * 2**30  # the fingerprint of a larger tree covers names and sizes only
# Unpacked bytes to packed bytes, at most. Images are compressed already.
MAX_EXPANSION = 200
_TOO_LARGE = f"more than {MAX_EXPANSION} times its size, unpacked"

# Bytes of an extended header in a tar, which has the next member's long name or times.
MAX_HEADER_BYTES = 2**16
EXTENDED_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
MAX_NAME = 4096  # characters of a path
UTF8_NAMES = 0x800  # the flag of a zip's member whose name is UTF-8
OF_WINDOWS = 0  # the system of a zip's member that was packed on Windows
DOS = "cp437"  # the code page of names in a zip that are not UTF-8, by the format's definition
# The letters of DOS that stand where Latin-1 has control characters and signs: Ç to Ö, and á to Ñ.
DOS_LETTERS = frozenset([*range(0x80, 0x9A), *range(0xA0, 0xA6)])

DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    ValueError,
    # An encrypted zip, or tarfile's recursion in extended headers of extended headers.
    RuntimeError,
)


class _NotRead(Exception):
    """An archive has content that only a malicious archive has."""


class _Header(tarfile.TarInfo):
    """A member's header, with limits.

    tarfile reads an extended header as a whole, at the length that it claims: a compressed megabyte
    can be a gigabyte of it.
    """

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> "_Header":
        header = super().frombuf(buf, encoding, errors)
        if header.type in EXTENDED_HEADERS and header.size > MAX_HEADER_BYTES:
            raise _NotRead(f"a header of {header.size:,} bytes, more than {MAX_HEADER_BYTES:,}")
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise _NotRead("a sparse file")
        return header

    def _proc_gnusparse_10(self, *_: Any) -> None:
        """Refuses a sparse file in PAX format, whose map can be of any length, too."""
        raise _NotRead("a sparse file")


@dataclass(frozen=True)
class Member:
    """A regular file of a tree.

    Attributes:
        name: The path within the tree, with /.
        size: Bytes of the file.
        offset: Where the file begins in the archive. Reading members in this order is fastest.
        tree: The tree.
        path: The path on this host, where the tree is a folder.
        handle: The archive library's object for the file.
        is_sequential: Whether members can be read quickly in order only, as in a compressed tar.
    """

    name: str
    size: int
    offset: int
    tree: "Tree" = field(repr=False)
    path: Path | None = None
    handle: Any = None
    is_sequential: bool = False

    def read_bytes(self) -> bytes:
        """Returns the contents; see Tree.read."""
        return self.tree.read(self)

    def read_start(self, number: int) -> bytes:
        """Returns the first bytes; see Tree.read_start."""
        return self.tree.read_start(self, number)

    def __str__(self) -> str:
        return printable(self.name)


class Tree:
    """The files of a folder or an archive.

    Attributes:
        members: The regular files, in the order of `offset`.
        passed_over: The paths of hidden files and folders, and of those that systems leave, which
            are no members.
        irregular: In a folder the paths of links that lead nowhere, pipes and devices.
        dos_names: Names in a zip that are not UTF-8, and have been read as DOS's.
        fingerprint: A hash of all names and sizes, in 64 hex digits; also of the contents, if they
            have at most MAX_HASHED_BYTES.

    Raises:
        UsageError: There is no folder or archive at the path.
        Failure: The archive is damaged, or has content that only a malicious archive has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed_over: list[str] = []
        self.irregular: list[str] = []
        self.dos_names: list[str] = []
        self._archive = cast(Any, None)  # a ZipFile or TarFile, where it is no folder
        fingerprint = hashlib.sha256()
        with self._errors_as_failures():
            if path.is_dir():
                self.members = self._folder_members()
            else:
                self._archive = _open(path)
                # The archive stays open as long as a member refers to the tree.
                weakref.finalize(self, self._archive.close)
                # Even an empty tar unpacks to a record.
                self._most_unpacked = MAX_EXPANSION * path.stat().st_size + tarfile.RECORDSIZE
                if isinstance(self._archive, zipfile.ZipFile):
                    members = self._zip_members()
                else:
                    members = self._tar_members(self._archive)
                self.members = self._check_limits(members)
            for member in self.members:
                fingerprint.update(f"{member.name}\0{member.size}\n".encode(errors="replace"))
            files = [member.path or path for member in self.members] if path.is_dir() else [path]
            if sum(file.stat().st_size for file in files) <= MAX_HASHED_BYTES:
                for _, content_digest in on_all_cores(file_digest, files):
                    fingerprint.update(content_digest)
        self.fingerprint = fingerprint.hexdigest()

    @contextmanager
    def _errors_as_failures(self, at: str = "") -> Iterator[None]:
        """Turns errors of the system and of archive libraries into a Failure of one line."""
        try:
            yield
        except OSError as error:
            raise Failure(
                f"cannot read '{error.filename or self.path}': {error.strerror or error}"
            ) from None
        except _NotRead as error:
            raise Failure(f"'{self.path}' holds {error}: not read") from None
        except DAMAGED as error:
            raise Failure(f"'{self.path}' is damaged{at}: {error}") from None

    def read(self, member: Member) -> bytes:
        """Returns a member's contents.

        Several threads may call this at the same time, unless the member is sequential.

        Raises:
            Failure: The member cannot be read, has another length than the archive says, or more
                bytes than an image may have.
        """
        if member.size > image.MAX_BYTES:
            raise Failure(
                f"'{self.path}': {member.name} has {member.size:,} bytes, too many for an image"
            )
        with self._errors_as_failures(f" at {member.name}"):
            if member.path:
                return member.path.read_bytes()
            if isinstance(self._archive, zipfile.ZipFile):
                with self._archive.open(member.handle) as file:
                    # Not all of it: it may unpack to more than the archive says.
                    content = file.read(member.size + 1)
            elif member.is_sequential:
                content = self._archive.extractfile(member.handle).read()
            else:
                content = os.pread(self._archive.fileobj.fileno(), member.size, member.offset)
        if len(content) != member.size:
            raise Failure(f"'{self.path}' is cut off: {member.name} is not whole")
        return content

    def read_start(self, member: Member, number: int) -> bytes:
        """Returns the first bytes of a member that is not sequential.

        Raises:
            Failure: The member cannot be read.
        """
        with self._errors_as_failures(f" at {member.name}"):
            if member.path:
                with member.path.open("rb") as file:
                    return file.read(number)
            if isinstance(self._archive, zipfile.ZipFile):
                with self._archive.open(member.handle) as packed:
                    return packed.read(number)
            descriptor = self._archive.fileobj.fileno()
            return os.pread(descriptor, min(number, member.size), member.offset)

    def find(self, name: str) -> Member | None:
        """Returns the first member with this file name, in any folder."""
        for member in self.members:
            if member.name.split("/")[-1] == name:
                return member
        return None

    def members_of_tar(self, member: Member) -> list[Member]:
        """Lists the files in a tar that is a member of this uncompressed tar.

        Only headers are read.

        Raises:
            Failure: The inner tar is damaged, cut off or empty, or exceeds a limit.
        """
        end = member.offset + member.size
        with (
            self._errors_as_failures(f" at {member.name}"),
            self.path.open("rb", buffering=0) as file,
        ):
            file.seek(member.offset)
            archive = tarfile.open(fileobj=file, mode="r:", tarinfo=_Header)
            inner = self._check_limits(self._tar_members(archive))
            # After an inner tar without an end, tarfile goes on with the members that follow it.
            within = [each for each in inner if each.handle.offset < end]
            if not within or within[-1].offset + within[-1].size > end:
                raise EOFError("it holds no files, or is cut off")
            return within

    def _check_limits(self, members: Iterable[Member]) -> list[Member]:
        """Returns the members, sorted by offset.

        Raises:
            _NotRead: They are too many, or unpack to too many bytes. No more are listed then.
        """
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
        """Lists a folder's members; adds the other paths to `passed_over` and `irregular`."""
        members: list[Member] = []
        for root, folders, names in os.walk(self.path, onerror=_raise, followlinks=True):
            folder = Path(root)
            parents = [each for each in folder.parents if each.is_relative_to(self.path)]
            if any(folder.samefile(parent) for parent in parents):
                raise Failure(f"'{root}' is a link to a folder that it is in")
            hidden = [name for name in folders if is_passed_over(name)]
            folders[:] = sorted(set(folders) - set(hidden))
            for name in sorted([*names, *hidden]):
                path = folder / name
                relative = path.relative_to(self.path).as_posix()
                if is_passed_over(name):
                    self.passed_over.append(relative)
                elif not path.is_file():
                    self.irregular.append(relative)
                else:
                    members.append(Member(relative, path.stat().st_size, len(members), self, path))
        return members

    def _zip_members(self) -> Iterator[Member]:
        """Yields a zip's members. Raises _NotRead for content that only malicious zips have."""
        for info in self._archive.infolist():
            name = _checked(self._zip_name(info))
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _NotRead(f"{info.filename!a}, a link or a device")
            # Other methods than these two unpack without limit.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _NotRead(
                    f"{info.filename!a}, not packed by deflate (unpack it, and give the folder)"
                )
            is_folder = info.is_dir() or name.endswith("/")
            if not is_folder and self._is_used(name):
                yield Member(name, info.file_size, info.header_offset, self, None, info)

    def _zip_name(self, info: zipfile.ZipInfo) -> str:
        """Returns the name of a zip's member.

        Where the zip does not say that names are UTF-8, they are in a code page of DOS. But macOS
        writes UTF-8 without saying so, and others write Latin-1, GBK or Shift-JIS. Such names keep
        their bytes, as names in a folder do, unless all their letters are DOS's. PowerShell 5
        writes backslashes between folders.
        """
        name = info.filename
        if not info.flag_bits & UTF8_NAMES:
            encoded = name.encode(DOS)
            name = encoded.decode(errors="surrogateescape")
            if not is_utf8(name):
                if not _is_of_dos(encoded):
                    return name
                name = info.filename
                self.dos_names.append(name)
        return name.replace("\\", "/") if info.create_system == OF_WINDOWS else name

    def _tar_members(self, archive: Any) -> Iterator[Member]:
        """Yields a tar's members. Raises _NotRead for content that only malicious tars have."""
        is_compressed = not isinstance(archive.fileobj, io.BufferedReader | io.FileIO)
        if is_compressed:
            archive.fileobj = _Decompressed(archive.fileobj, self._most_unpacked)
        for number, info in enumerate(iter(archive.next, None)):
            # tarfile keeps all headers. Here each is dropped once it has been checked.
            archive.members.clear()
            info.pax_headers = {}
            if number == MAX_MEMBERS:
                raise _NotRead(f"more than {MAX_MEMBERS:,} files and folders")
            name = _checked(info.name)
            if not info.isfile() and not info.isdir():
                raise _NotRead(f"{info.name!a}, a link or a device")
            if info.isfile() and self._is_used(name):
                yield Member(name, info.size, info.offset_data, self, None, info, is_compressed)
        # At the end of the stream the decompressor verifies its checksum.
        while is_compressed and archive.fileobj.read(2**20):
            pass

    def _is_used(self, name: str) -> bool:
        """Returns whether a file of an archive is a member; adds the others to `passed_over`."""
        if not name or any(map(is_passed_over, name.split("/"))):
            self.passed_over.append(name)
            return False
        return True


def _open(path: Path) -> zipfile.ZipFile | tarfile.TarFile:
    """Opens an archive. Raises UsageError if there is none."""
    if not path.exists():
        raise UsageError(f"there is no file or folder '{path}'")
    if zipfile.is_zipfile(path):
        return zipfile.ZipFile(path)
    try:
        return tarfile.open(path, tarinfo=_Header)
    except tarfile.ReadError:
        raise UsageError(
            f"'{path}' is neither a folder nor a zip or tar archive, or it is damaged"
        ) from None


def _checked(name: str) -> str:
    """Returns a member's name without a leading `./`.

    Raises:
        _NotRead: The name would lead out of the folder into which an archive is unpacked.
    """
    if len(name) > MAX_NAME:
        raise _NotRead(f"a name of {len(name):,} characters")
    parts = name.replace("\\", "/").split("/")
    if parts[0] == "" or ".." in parts or ":" in parts[0] or "\0" in name:
        raise _NotRead(f"{name!a}, which leads out of the archive")
    return name.removeprefix("./")


def _is_of_dos(name: bytes) -> bool:
    """Returns whether a path in a zip is most likely in DOS's code page, in a European language.

    All its other letters than ASCII are DOS_LETTERS then, and no name is mostly of them, as names in
    Shift-JIS are.
    """
    for part in re.split(rb"[/\\]", name):
        stem = part.rpartition(b".")[0] or part
        others = [letter for letter in stem if letter >= 0x80]
        if not DOS_LETTERS.issuperset(others) or 2 * len(others) >= max(1, len(stem)):
            return False
    return True


def file_digest(path: Path) -> bytes:
    """Returns the SHA-256 of a file, 32 bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _raise(error: OSError) -> None:
    raise error


class _Decompressed:
    """The unpacked bytes of a compressed tar, up to a limit.

    Args:
        file: The file object that decompresses.
        most: The number of bytes beyond which reading raises _NotRead.
    """

    def __init__(self, file: Any, most: int) -> None:
        self.file = file
        self.most = most
        self.tell = file.tell
        self.seekable = file.seekable
        self.close = file.close

    def seek(self, position: int) -> int:
        if position > self.most:  # seeking decompresses all bytes before the position
            raise _NotRead(_TOO_LARGE)
        return self.file.seek(position)

    def read(self, size: int) -> bytes:
        content = self.file.read(size)
        if self.tell() > self.most:
            raise _NotRead(_TOO_LARGE)
        return content
