"""A data set as tar shards at any URL that fsspec supports: `hvdtrain data pack` writes them, training reads from them.

The shards have webdataset's layout (`000000012.png`, then `000000012.cls` with the index of its class), so webdataset's
tools read them too. `index.json` has each image's shard, offset and CRC-32: images can be read in any order, so
training sees the same samples in the same order as from the folder.
"""

import hashlib
import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hvdtrain.data import image
from hvdtrain.data.folder import ImageFolder, usable_size
from hvdtrain.data.identity import identity, sample_hash
from hvdtrain.data.sampling import packing_order
from hvdtrain.data.selection import PARTS
from hvdtrain.data.sharded import CACHED, ROW, Index, Part, Shard, ShardedImages, parse_index
from hvdtrain.data.storage import Progress, cache_root, fetch_whole
from hvdtrain.errors import Failure, UsageError

INDEX = "index.json"
MAX_INDEX_BYTES = 2**30  # of some ten million images


def pack(data: ImageFolder, url: str, shard_bytes: int, force: bool, progress: Progress) -> int:
    """Write a data set's shards and index. Each shard has as many images, mixed as sampling.packing_order has them.

    The index is written last, so that readers see the whole data set or none. Nothing is done if that is at the URL.

    Args:
        shard_bytes: of a shard on average; images differ.

    Returns:
        How many images a shard has.

    Raises:
        UsageError: something else is packed at the URL, fsspec does not support it, or writing failed.
        Failure: an image cannot be read.
    """
    filesystem, root = _open_filesystem(url)
    sizes = [path.stat().st_size for part in PARTS for path, _ in getattr(data, part)]
    # An image takes its header and blocks of 512 bytes, and those of its class.
    per_shard = max(1, shard_bytes * len(sizes) // sum(512 * (3 + -(-size // 512)) for size in sizes))
    dataset_hash = identity(data)
    # Shards of another packing have other names: of two at the same time, the one whose index is last is whole.
    key = hashlib.sha256(f"{dataset_hash} {sample_hash(data.test)} {per_shard}".encode()).hexdigest()[:16]
    old_shards: list[Shard] = []
    with _errors_as_usage(url):
        if filesystem.exists(f"{root}/{INDEX}"):
            with suppress(UsageError) if force else nullcontext():
                old = _read_index(filesystem, root, url)
                old_shards = old.shards
                if not force and old.key == key:
                    return per_shard
                if not force:
                    raise UsageError(f"{url} holds something else: give another URL, or replace it with --force")
        filesystem.makedirs(root, exist_ok=True)
        shards, parts = _write_shards(data, filesystem, root, per_shard, key, progress)
        side, classes = image.native_side(data), list(data.classes)
        index = Index("hvdtrain data pack", 3, dataset_hash, key, side, classes, shards, *parts)
        filesystem.pipe_file(f"{root}/{INDEX}", msgspec.json.encode(index))
        for name in {shard.name for shard in old_shards} - {shard.name for shard in shards}:
            if filesystem.exists(f"{root}/{name}"):
                filesystem.rm_file(f"{root}/{name}")
    return per_shard


def _write_shards(
    data: ImageFolder, filesystem: Any, root: str, per_shard: int, key: str, progress: Progress
) -> tuple[list[Shard], list[Part]]:
    """The shards, and the parts of the index."""
    samples_of = {part: getattr(data, part) for part in PARTS}
    total, done = sum(map(len, samples_of.values())), 0
    shards: list[Shard] = []
    parts = []
    for part, samples in samples_of.items():
        rows = np.zeros(len(samples), ROW)
        order = packing_order(len(samples)).tolist()
        for first in range(0, len(order), per_shard):
            numbers = order[first : first + per_shard]
            members = [(path, label, image.read(path)) for path, label in map(samples.__getitem__, numbers)]
            name = f"{part}-{first:09d}-{key}.tar"
            content, offsets = _make_tar(members, first)
            filesystem.pipe_file(f"{root}/{name}", content)
            for number, (_, label, encoded), offset in zip(numbers, members, offsets, strict=True):
                rows[number] = (len(shards), offset, len(encoded), zlib.crc32(encoded), label)
            shards.append(Shard(name, len(content)))
            done += len(members)
            progress(done, total)
        names = b"".join(os.fsencode(path.relative_to(data.root).as_posix()) + b"\0" for path, _ in samples)
        parts.append(Part(rows.tobytes(), names))
    return shards, parts


def read(url: str) -> ImageFolder:
    """List the images that are packed at a URL. UsageError where it cannot be reached, or has no valid index."""
    filesystem, root = _open_filesystem(url)
    index = _read_index(filesystem, root, url)
    cache = None
    if url.startswith(CACHED):
        place = f"{filesystem.unstrip_protocol(root)} {index.key}"
        cache = cache_root() / "shards" / hashlib.sha256(place.encode()).hexdigest()[:16]
    train, validation, test = (
        ShardedImages(part, filesystem, root, index.shards, cache)
        for part in (index.train, index.validation, index.test)
    )
    side = usable_size(index.image_size)
    return ImageFolder(url, tuple(index.classes), train, validation, test, index.dataset_hash, side)


def _read_index(filesystem: Any, root: str, url: str) -> Index:
    with _errors_as_usage(url), tempfile.TemporaryDirectory() as folder:
        try:
            fetch_whole(filesystem, f"{root}/{INDEX}", file := Path(folder, INDEX), MAX_INDEX_BYTES)
            return parse_index(file.read_bytes())
        except FileNotFoundError:
            raise UsageError(
                f"{url} holds no data set: there is no {INDEX}; make one with `hvdtrain data pack`"
            ) from None
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{url}/{INDEX} cannot be read as a data set's ({error}): pack it anew with --force"
            ) from None


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
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"{url} cannot be used: {reason}") from None


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
