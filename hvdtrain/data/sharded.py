"""Images in shards, as training sees them: a million of them take some 60 MB."""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from hvdtrain.data.folder import ManyImages
from hvdtrain.data.image import MAX_BYTES
from hvdtrain.data.shard_cache import read_kept
from hvdtrain.errors import Failure

CACHED = "simplecache::"  # fsspec's prefix for URLs to cache. We do that ourselves: fsspec's is not safe with threads
MAX_SHARD_BYTES = 2**34
# Where an image is: the number of its shard, its place in it, its size and checksum, and the number of its class.
ROW = np.dtype([("shard", "<u4"), ("offset", "<i8"), ("bytes", "<u4"), ("crc32", "<u4"), ("class", "<u4")])


class Shard(msgspec.Struct):
    """A shard's file name, and how many bytes it has."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.tar\Z")]
    bytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_SHARD_BYTES)]


class Part(msgspec.Struct):
    """The images of one part of a data set, in the folder's order.

    Attributes:
        rows: ROW of each image, one after the other; in JSON in base64.
        names: the path in the folder of each, as os.fsencode gives it, each followed by a zero byte; in base64.
    """

    rows: bytes
    names: bytes


class Index(msgspec.Struct):
    """`index.json`: what a packed data set is, and where each of its images lies.

    Attributes:
        dataset_hash: as in a run's manifest; see data.identity.
        key: differs where other images, or other numbers of them in a shard, are packed.
        image_size: as of an ImageFolder.
    """

    made_by: Literal["hvdtrain data pack"]
    format: Literal[3]
    dataset_hash: str
    key: str
    image_size: int
    classes: Annotated[list[str], msgspec.Meta(min_length=2)]
    shards: list[Shard]
    train: Part
    validation: Part
    test: Part


@dataclass(frozen=True)
class ShardedImage:
    """One image in a shard.

    Attributes:
        name: its path in the folder that was packed.
    """

    part: "ShardedImages" = field(repr=False)
    shard: Shard
    offset: int
    size: int
    crc: int
    name: str

    @property
    def place(self) -> tuple[str, int]:
        """Where it is; images that are read in this order are read shard by shard."""
        return self.shard.name, self.offset

    def read_bytes(self) -> bytes:
        """The encoded image. Failure where it cannot be read, or is not what was packed."""
        content = self._read()
        if self.part.cache and zlib.crc32(content) != self.crc:  # what is kept is damaged or outdated
            (self.part.cache / self.shard.name).unlink(missing_ok=True)
            content = self._read()
        if len(content) != self.size:
            raise Failure(
                f"{self}: {len(content):,} bytes came and not {self.size:,}: where a server sends no parts of files, "
                f"use {CACHED}URL, with room for whole shards on the disk of the cache (HVDTRAIN_CACHE moves it)"
            )
        if zlib.crc32(content) != self.crc:
            raise Failure(f"{self} is not what was packed: its checksum differs")
        return content

    def _read(self) -> bytes:
        path, filesystem = f"{self.part.root}/{self.shard.name}", self.part.filesystem
        try:
            if self.part.cache:
                local = self.part.cache / self.shard.name
                kept = read_kept(local, filesystem, path, self.shard.bytes, self.offset, self.size)
                if kept is not None:
                    return kept
            return filesystem.cat_file(path, start=self.offset, end=self.offset + self.size)
        except Exception as error:  # each of fsspec's file systems raises its own
            raise Failure(f"cannot read {self}: {error}") from None

    def __str__(self) -> str:
        return f"{self.name} in {self.part.root}/{self.shard.name}"


class ShardedImages(ManyImages):
    """The images of one part of a packed data set, in the folder's order: (image, index of its class) each.

    Args:
        filesystem: fsspec's, on which the shards are.
        root: the folder in it.
        cache: the folder in which whole shards are kept; None where they are not.
    """

    def __init__(
        self, part: Part, filesystem: Any, root: str, shards: Sequence[Shard], cache: Path | None
    ) -> None:  # fmt: skip
        self.rows, self.names = np.frombuffer(part.rows, ROW), part.names
        self.ends = array("q", (np.flatnonzero(np.frombuffer(part.names, np.uint8) == 0) + 1).tobytes())
        self.filesystem, self.root, self.shards, self.cache = filesystem, root, shards, cache

    def _image(self, index: int) -> tuple[ShardedImage, int]:
        number, offset, size, crc, label = self.rows[index].item()
        name = self._name(index)[:-1].decode(errors="surrogateescape")
        return ShardedImage(self, self.shards[number], offset, size, crc, name), label

    def labels(self) -> np.ndarray:
        """The class of each image, [images] int64."""
        return self.rows["class"].astype(np.int64)


def parse_index(content: bytes) -> Index:
    """The index in a file. ValueError where it is none, or has what cannot be: all images have a name and a class, and
    lie within the shards.
    """
    index = msgspec.json.decode(content, type=Index)
    parts = (index.train, index.validation, index.test)
    if not index.train.rows or not index.validation.rows:
        raise ValueError("it has no images to train or to validate on")
    if len({shard.name for shard in index.shards}) < len(index.shards):
        raise ValueError("a shard is listed twice")
    if any(part.names.count(b"\0") * ROW.itemsize != len(part.rows) for part in parts):
        raise ValueError("it does not have as many names as rows")
    rows = np.concatenate([np.frombuffer(part.rows, ROW) for part in parts])
    shards, offsets, lengths = rows["shard"], rows["offset"], rows["bytes"].astype(np.int64)
    sizes = np.array([shard.bytes for shard in index.shards])
    if (
        shards.max() >= len(sizes) or rows["class"].max() >= len(index.classes) or offsets.min() < 0
        or not 0 < lengths.min() <= lengths.max() <= MAX_BYTES
        or (offsets > sizes[shards] - lengths).any()
    ):  # fmt: skip
        raise ValueError("an image has no class, or does not lie in a shard")
    return index
