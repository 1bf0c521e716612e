"""A data set in tar shards at any URL that fsspec knows, trained from without a copy: `hvdtrain data pack` makes them.

The shards have webdataset's layout (`000000012.png` beside `000000012.cls`, the number of its class), so its tools
read them too. `index.json` says where in which shard each image is, with its CRC-32: any order of samples can be read
from there, and the order is the same as from the folder.
"""

import dataclasses
import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.data.folder import ImageFolder, Samples, content_hash
from hvdtrain.data.place import cache_root, locked
from hvdtrain.data.select import PARTS
from hvdtrain.errors import Failure, UsageError

INDEX = "index.json"
MAKER = "hvdtrain data pack"
FORMAT = 1
KEEP = "simplecache::"  # fsspec's word for a URL whose files are kept here; its own does it for one thread at a time
LARGEST = 128 * 2**20  # bytes of an image; more is a broken index

Row = tuple[int, int, int, int, int, str]  # shard, offset, bytes, CRC-32, class, path in the folder


@dataclass(frozen=True)
class Packed:
    """One image in a shard."""

    files: Any = field(repr=False)  # fsspec's file system
    shard: str
    offset: int
    size: int
    crc: int
    name: str
    keep: str  # where whole shards are to be kept in the cache: what tells this one from others of its name

    def read_bytes(self) -> bytes:
        """The encoded image. Failure where it cannot be read, or is not what was packed."""
        content = self._read()
        if self.keep and zlib.crc32(content) != self.crc:
            self._kept().unlink(missing_ok=True)  # the copy here is damaged, or the shard was packed anew
            content = self._read()
        if len(content) != self.size:
            raise Failure(
                f"{self}: {len(content):,} bytes came and not {self.size:,}: where a server does not send parts of "
                f"files, use {KEEP}URL"
            )
        if zlib.crc32(content) != self.crc:
            raise Failure(f"{self} is not what was packed: its checksum differs")
        return content

    def _read(self) -> bytes:
        try:
            if self.keep:
                with self._kept().open("rb") as file:
                    return os.pread(file.fileno(), self.size, self.offset)
            return self.files.cat_file(self.shard, start=self.offset, end=self.offset + self.size)
        except Exception as error:  # every file system has its own
            raise Failure(f"cannot read {self}: {error}") from None

    def _kept(self) -> Path:
        """The whole shard in the user's cache, fetched once for all ranks of this host."""
        whole = f"{self.files.unstrip_protocol(self.shard)} {self.keep}"
        name = f"{hashlib.sha256(whole.encode()).hexdigest()[:16]}-{Path(self.shard).name}"
        local = cache_root() / "shards" / name
        if not local.exists():
            with locked(local):
                if not local.exists():
                    partial = local.with_name(f"{name}.partial")
                    self.files.get_file(self.shard, str(partial))
                    partial.rename(local)
        return local

    def __str__(self) -> str:
        return f"{self.name} in {self.shard}"


def pack(data: ImageFolder, url: str, shard_bytes: int, force: bool, progress: Callable[[int, int], None]) -> bool:
    """Write a data set's shards and index; False if they are there already.

    The index is written last: readers see the whole data set, or none.

    Raises:
        UsageError: something else is there, or fsspec does not know the URL.
        Failure: writing failed; there is no index then.
    """
    files, root = _open(url)
    known, test = content_hash(data), content_hash(dataclasses.replace(data, train=data.test, validation=()))
    with _told(url):
        if files.exists(f"{root}/{INDEX}"):
            old = _index(url)
            if not force and (old.get("content_hash"), old.get("test_hash")) == (known, test):
                return False
            if not force:
                raise UsageError(f"{url} holds another data set: give another URL, or replace it with --force")
            files.rm_file(f"{root}/{INDEX}")
            for shard in old.get("shards", []):
                if files.exists(place := f"{root}/{Path(str(shard['name'])).name}"):
                    files.rm_file(place)
        files.makedirs(root, exist_ok=True)
        samples = {part: getattr(data, part) for part in PARTS}
        total, done = sum(map(len, samples.values())), 0
        shards: list[dict[str, Any]] = []
        rows: dict[str, list[Row]] = {}
        for part, own in samples.items():
            rows[part] = []
            for members in _sharded(own, shard_bytes):
                name = f"{part}-{len(rows[part]):09d}.tar"
                content, offsets = _tar(members, len(rows[part]))
                files.pipe_file(f"{root}/{name}", content)
                shards.append({"name": name, "bytes": len(content)})
                for (path, label, image), offset in zip(members, offsets, strict=True):
                    place = path.relative_to(data.root).as_posix()
                    rows[part].append((len(shards) - 1, offset, len(image), zlib.crc32(image), label, place))
                done += len(members)
                progress(done, total)
        index = {
            "made_by": MAKER, "format": FORMAT, "content_hash": known, "test_hash": test,
            "classes": data.classes, "shards": shards,
            "columns": ["shard", "offset", "bytes", "crc32", "class", "path"], "samples": rows,
        }  # fmt: skip
        files.pipe_file(f"{root}/{INDEX}", json.dumps(index).encode())
    return True


def read(url: str) -> ImageFolder:
    """What was packed there. UsageError where it cannot be reached, or is no index of ours."""
    files, root = _open(url)
    index = _index(url)
    try:
        if index["made_by"] != MAKER or index["format"] != FORMAT:
            raise ValueError(f"made by {index['made_by']!a}, format {index['format']!a}")
        classes = tuple(map(str, index["classes"]))
        shards = [str(shard["name"]) for shard in index["shards"]]
        keep = f"{index['content_hash']} {index['test_hash']}" if url.startswith(KEEP) else ""
        if any("/" in name or name.startswith(".") for name in shards):
            raise ValueError("a shard is not beside the index")

        def samples(part: str) -> Samples:
            found = []
            for shard, offset, size, crc, label, name in index["samples"][part]:
                if not (0 <= label < len(classes) and 0 <= shard < len(shards) and offset >= 0 and 0 < size <= LARGEST):
                    raise ValueError(f"{name!a} has no class, shard or place")
                found.append((Packed(files, f"{root}/{shards[shard]}", offset, size, crc, str(name), keep), label))
            return tuple(found)

        train, validation, test = map(samples, PARTS)
        if len(classes) < 2 or not train or not validation:
            raise ValueError("it has fewer than two classes, or no images to train or to validate on")
        return ImageFolder(url, classes, train, validation, test, known_hash=str(index["content_hash"]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UsageError(f"{url}/{INDEX} cannot be read as a data set's: {error}") from None


def _index(url: str) -> dict[str, Any]:
    files, root = _open(url)
    with _told(url):
        try:
            return json.loads(files.cat_file(f"{root}/{INDEX}"))
        except FileNotFoundError:
            raise UsageError(
                f"{url} holds no data set: there is no {INDEX}; make one with `hvdtrain data pack`"
            ) from None
        except ValueError as error:
            raise UsageError(f"{url}/{INDEX} cannot be read as a data set's: {error}") from None


def _open(url: str) -> tuple[Any, str]:
    """The file system and the path in it."""
    import fsspec

    with _told(url):
        files, root = fsspec.core.url_to_fs(url.removeprefix(KEEP))
        return files, root.rstrip("/")


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Whatever a file system raises, as one line."""
    try:
        yield
    except (UsageError, Failure):
        raise
    except ImportError as error:
        raise UsageError(f"{url}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"{url} cannot be used: {reason}") from None


def _sharded(samples: Samples, shard_bytes: int) -> Iterator[list[tuple[Path, int, bytes]]]:
    """(file, class, contents) of the images of each shard."""
    members: list[tuple[Path, int, bytes]] = []
    size = 0
    for path, label in samples:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise Failure(f"cannot read '{path}': {error.strerror}") from None
        if members and size + len(content) > shard_bytes:
            yield members
            members, size = [], 0
        members.append((path, label, content))
        size += len(content)
    if members:
        yield members


def _tar(members: list[tuple[Path, int, bytes]], first: int) -> tuple[bytes, list[int]]:
    """A shard, and where in it each image begins. Nothing in it depends on when or by whom it is made."""
    buffer = io.BytesIO()
    offsets = []
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (path, label, content) in enumerate(members, first):
            for suffix, inside in ((path.suffix.lower(), content), (".cls", str(label).encode())):
                info = tarfile.TarInfo(f"{number:09d}{suffix}")
                info.size = len(inside)
                tar.addfile(info, io.BytesIO(inside))
            offsets.append(buffer.tell() - 1024 - -(-len(content) // 512) * 512)
    return buffer.getvalue(), offsets
