"""A data set as tar shards at any URL that fsspec supports: `hvdtrain data pack` writes them, training reads from them.

The shards have webdataset's layout (`000000012.png` beside `000000012.cls`, which has the index of its class), so its
tools read them too. `index.json` has each image's shard, offset and CRC-32: images can be read in any order, so
training sees the same samples in the same order as from the folder.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.data import image
from hvdtrain.data.folder import ImageFolder, content_hash, usable_size
from hvdtrain.data.identity import keep_content_hash, look
from hvdtrain.data.sampling import packing_order
from hvdtrain.data.selection import PARTS
from hvdtrain.data.shard_cache import ShardCache, shards_in_use
from hvdtrain.data.sharded import CACHED, ShardedImages, check_images, check_shards, parse_index, rows
from hvdtrain.data.storage import cache_root, fetch_whole
from hvdtrain.errors import Failure, UsageError

INDEX = "index.json"
MAKER = "hvdtrain data pack"
FORMAT = 1
MAX_INDEX_BYTES = 2**30  # of some ten million images

Row = tuple[int, int, int, int, int, str]  # shard, offset, bytes, CRC-32, class, path in the folder


def pack(
    data: ImageFolder, url: str, shard_bytes: int, force: bool, progress: Callable[[int, int], None]
) -> tuple[int, bool]:
    """Write a data set's shards and index. Each shard has as many images, mixed as sampling.packing_order has them.

    The index is written last, so that readers see the whole data set or none.

    Args:
        shard_bytes: of a shard on average; images differ.

    Returns:
        How many images a shard has, 0 where an older version has made them; and whether shards were written: they may
        be there already.

    Raises:
        UsageError: another data set is there, fsspec does not support the URL, or writing failed.
        Failure: an image cannot be read.
    """
    filesystem, root = _open_filesystem(url)
    listing, began = look(data), time.time()
    own_hash, test_hash = content_hash(data), content_hash(dataclasses.replace(data, train=data.test, validation=()))
    keep_content_hash(data, listing, began, own_hash)
    replaced: set[str] = set()  # shards
    with _errors_as_usage(url):
        if filesystem.exists(f"{root}/{INDEX}"):
            old = _read_index(url)
            if not force and (old.get("content_hash"), old.get("test_hash")) == (own_hash, test_hash):
                return int(old.get("images_per_shard", 0)), False
            if not force:
                raise UsageError(f"{url} holds another data set: give another URL, or replace it with --force")
            replaced = {Path(str(shard["name"])).name for shard in old.get("shards", [])}
        filesystem.makedirs(root, exist_ok=True)
        packed_bytes = [_packed_bytes(path) for part in PARTS for path, _ in getattr(data, part)]
        per_shard = max(1, shard_bytes * len(packed_bytes) // sum(packed_bytes))
        # What is packed here at the same time, or was before, has other names: whichever index is last is whole.
        key = hashlib.sha256(f"{own_hash} {test_hash} {per_shard}".encode()).hexdigest()[:8]
        shards, rows_of = _write_shards(data, filesystem, root, per_shard, key, progress)
        index = {
            "made_by": MAKER, "format": FORMAT, "content_hash": own_hash, "test_hash": test_hash,
            "image_size": image.native_side(data), "classes": data.classes, "shards": shards,
            "images_per_shard": per_shard,
            "columns": ["shard", "offset", "bytes", "crc32", "class", "path"], "samples": rows_of,
        }  # fmt: skip
        filesystem.pipe_file(f"{root}/{INDEX}", json.dumps(index).encode())
        for old_shard in sorted(replaced - {shard["name"] for shard in shards}):
            if filesystem.exists(f"{root}/{old_shard}"):
                filesystem.rm_file(f"{root}/{old_shard}")
    return per_shard, True


def _write_shards(
    data: ImageFolder, filesystem: Any, root: str, per_shard: int, key: str, progress: Callable[[int, int], None]
) -> tuple[list[dict[str, Any]], dict[str, list[Row]]]:
    """The shards' names and sizes, and each part's rows in the order of its images in the folder."""
    samples_of = {part: getattr(data, part) for part in PARTS}
    total, done = sum(map(len, samples_of.values())), 0
    shards: list[dict[str, Any]] = []
    rows_of: dict[str, list[Row]] = {}
    for part, samples in samples_of.items():
        own_rows: dict[int, Row] = {}  # by the image's number in the folder
        order = packing_order(len(samples)).tolist()
        for first in range(0, len(order), per_shard):
            numbers = order[first : first + per_shard]
            members = [(path, label, image.read(path)) for path, label in map(samples.__getitem__, numbers)]
            name = f"{part}-{first:09d}-{key}.tar"
            content, offsets = _make_tar(members, first)
            filesystem.pipe_file(f"{root}/{name}", content)
            shards.append({"name": name, "bytes": len(content)})
            for number, (path, label, encoded), offset in zip(numbers, members, offsets, strict=True):
                relative = path.relative_to(data.root).as_posix()
                own_rows[number] = (len(shards) - 1, offset, len(encoded), zlib.crc32(encoded), label, relative)
            done += len(members)
            progress(done, total)
        rows_of[part] = [own_rows[number] for number in range(len(samples))]
    return shards, rows_of


def read(url: str, shuffle_block: int = 0) -> ImageFolder:
    """List the images that are packed at a URL. UsageError where it cannot be reached, or has no valid index.

    Args:
        shuffle_block: with which they will be read: shards that are not in use then can make room.
    """
    filesystem, root = _open_filesystem(url)
    index = _read_index(url)
    try:
        if index["made_by"] != MAKER or index["format"] != FORMAT:
            raise ValueError(f"made by {index['made_by']!a}, format {index['format']!a}")
        classes = tuple(map(str, index["classes"]))
        shards = [str(shard["name"]) for shard in index["shards"]]
        sizes = [int(shard["bytes"]) for shard in index["shards"]]
        check_shards(shards, sizes)
        train, validation, test = (ShardedImages(rows(index["samples"][part])) for part in PARTS)
        if len(classes) < 2 or not train or not validation:
            raise ValueError("it has fewer than two classes, or no images to train or to validate on")
        check_images((train, validation, test), len(classes), shards, sizes)
        cache = None
        if url.startswith(CACHED):
            key = f"{filesystem.unstrip_protocol(root)} {index['content_hash']} {index['test_hash']}"
            kept_in = cache_root() / "shards" / hashlib.sha256(key.encode()).hexdigest()[:16]
            per_shard = int(index.get("images_per_shard", 0))
            cache = ShardCache(kept_in, shards_in_use(shuffle_block, per_shard, validation.shards()))
            with contextlib.suppress(OSError):
                os.utime(kept_in)  # used now: other data sets' shards go first
        paths = [f"{root}/{name}" for name in shards]
        for part in (train, validation, test):
            part.lie_in(filesystem, paths, sizes, cache)
        side = usable_size(index.get("image_size"))  # of an older version, it has none
        return ImageFolder(url, classes, train, validation, test, str(index["content_hash"]), side)
    except KeyError as error:
        raise UsageError(f"{url}/{INDEX} cannot be read as a data set's: it has no {error.args[0]!a}") from None
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise UsageError(f"{url}/{INDEX} cannot be read as a data set's: {error}") from None


def _read_index(url: str) -> dict[str, Any]:
    filesystem, root = _open_filesystem(url)
    with _errors_as_usage(url), tempfile.TemporaryDirectory() as folder:
        try:
            fetch_whole(filesystem, f"{root}/{INDEX}", index := Path(folder, INDEX), MAX_INDEX_BYTES)
            return parse_index(index.read_bytes())
        except FileNotFoundError:
            raise UsageError(
                f"{url} holds no data set: there is no {INDEX}; make one with `hvdtrain data pack`"
            ) from None
        except ValueError as error:
            raise UsageError(f"{url}/{INDEX} cannot be read as a data set's: {error}") from None


def _open_filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system for the URL, and the path in it."""
    import fsspec

    with _errors_as_usage(url):
        filesystem, root = fsspec.core.url_to_fs(url.removeprefix(CACHED))
        return filesystem, root.rstrip("/")


@contextmanager
def _errors_as_usage(url: str) -> Iterator[None]:
    """Turn whatever a file system raises into a UsageError of one line."""
    try:
        yield
    except (UsageError, Failure):
        raise
    except ImportError as error:
        raise UsageError(f"{url}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"{url} cannot be used: {reason}") from None


def _packed_bytes(path: Path) -> int:
    """What an image takes in a shard: its header and blocks of 512 bytes, and those of its class."""
    return 512 * (3 + -(-path.stat().st_size // 512))


def _make_tar(members: list[tuple[Path, int, bytes]], first: int) -> tuple[bytes, list[int]]:
    """A shard, and where in it each image begins. Equal members give equal bytes, whenever and by whomever made."""
    buffer = io.BytesIO()
    offsets = []
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (path, label, content) in enumerate(members, first):
            for suffix, file_content in ((path.suffix.lower(), content), (".cls", str(label).encode())):
                info = tarfile.TarInfo(f"{number:09d}{suffix}")
                info.size = len(file_content)
                tar.addfile(info, io.BytesIO(file_content))
            # The image's blocks of 512 bytes are followed by the class's header and block, 1024 bytes.
            offsets.append(buffer.tell() - 1024 - -(-len(content) // 512) * 512)
    return buffer.getvalue(), offsets
