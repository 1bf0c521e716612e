"""Images in shards, as training sees them: a million of them take some 100 MB, and come from an index in parts."""

import re
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from hvdtrain.config.untrusted import parse_json
from hvdtrain.data.folder import ManyImages
from hvdtrain.data.image import MAX_BYTES
from hvdtrain.data.shard_cache import ShardCache
from hvdtrain.errors import Failure

CACHED = "simplecache::"  # fsspec's prefix for URLs to cache. We do that ourselves: fsspec's is not safe with threads
COLUMNS = 6
MAX_SHARD_BYTES = 2**34
_SHARD = re.compile(r"\w[\w.-]{0,199}\.tar", re.ASCII)
PARSED = 2**18  # bytes of an index that are parsed at a time
# Between two rows. The quote ends the path: if it began one, or a row held another, the text before it would be no
# JSON, and the whole is parsed at once.
_BETWEEN = re.compile(rb'(?<!\\)"\s*\]\s*(,)\s*\[')


@dataclass(frozen=True)
class ShardedImage:
    """One image in a shard.

    Attributes:
        filesystem: fsspec's, on which the shard is.
        name: the image's path in the folder that was packed.
        cache: of this packing of the data set; None where shards are not kept.
        shard_bytes: of the whole shard.
    """

    filesystem: Any = field(repr=False)
    shard: str
    offset: int
    size: int
    crc: int
    name: str
    cache: ShardCache | None
    shard_bytes: int

    @property
    def place(self) -> tuple[str, int]:
        """Where it is; images that are read in this order are read shard by shard."""
        return self.shard, self.offset

    def read_bytes(self) -> bytes:
        """The encoded image. Failure where it cannot be read, or is not what was packed."""
        content = self._read()
        if self.cache and zlib.crc32(content) != self.crc:
            self.cache.forget(self.shard)
            content = self._read()
        if len(content) != self.size:
            advice = f"use {CACHED}URL; a shard that was cut off has to be packed again"
            if self.cache:
                advice = f"make room for whole shards on the disk of {self.cache.folder.parent}, or set HVDTRAIN_CACHE"
            raise Failure(
                f"{self}: {len(content):,} bytes came and not {self.size:,}: where a server does not send parts of "
                f"files, {advice}"
            )
        if zlib.crc32(content) != self.crc:
            raise Failure(f"{self} is not what was packed: its checksum differs")
        return content

    def _read(self) -> bytes:
        try:
            if self.cache:
                kept = self.cache.read(self.filesystem, self.shard, self.shard_bytes, self.offset, self.size)
                if kept is not None:
                    return kept
            return self.filesystem.cat_file(self.shard, start=self.offset, end=self.offset + self.size)
        except Exception as error:  # each of fsspec's file systems raises its own
            raise Failure(f"cannot read {self}: {error}") from None

    def __str__(self) -> str:
        return f"{self.name} in {self.shard}"


class ShardedImages(ManyImages):
    """The images of one part of a packed data set, in the folder's order: (image, index of its class) each.

    Args:
        rows: of the index, some at a time. See check_images.

    Raises:
        TypeError, ValueError, OverflowError: a row is none.
    """

    def __init__(self, rows: Iterable[Any]) -> None:
        self.columns = [array(kind) for kind in "IqIII"]
        self._shards, self._offsets, self._sizes, self._crcs, self._labels = self.columns
        self.names, self.ends = bytearray(), array("q")  # in UTF-8
        for some in rows:
            if wrong := {len(row) for row in some} - {COLUMNS}:
                raise ValueError(f"a row has {wrong.pop()} columns and not {COLUMNS}")
            for column, values in zip(self.columns, zip(*some, strict=True), strict=False):  # names aside
                column.extend(values)
            for *_, name in some:
                self.names += str(name).encode(errors="surrogatepass")
                self.ends.append(len(self.names))

    def lie_in(self, filesystem: Any, shards: Sequence[str], sizes: Sequence[int], cache: ShardCache | None) -> None:
        """Say where the shards are, and how many bytes each has: before this no image can be asked for."""
        self._filesystem, self._paths, self._shard_bytes, self._cache = filesystem, shards, sizes, cache

    def _image(self, index: int) -> tuple[ShardedImage, int]:
        shard, name = self._shards[index], self._name(index).decode(errors="surrogatepass")
        found = ShardedImage(
            self._filesystem, self._paths[shard], self._offsets[index], self._sizes[index], self._crcs[index], name,
            self._cache, self._shard_bytes[shard],
        )  # fmt: skip
        return found, self._labels[index]

    def labels(self) -> np.ndarray:
        """The class of each image, [images] int64."""
        return np.array(self._labels, np.int64)

    def shards(self) -> int:
        """In how many shards they are."""
        return len(set(self._shards))

    def advice(self) -> str:
        """What to tell who shuffles an epoch as a whole, where whole shards are kept; nothing where they are here."""
        used = set(self._shards)
        away = [shard for shard in used if self._cache and not self._cache.has(self._paths[shard])]
        if len(away) < 2:
            return ""
        return (
            f"the first batches need {len(away)} shards, which are fetched now: with --shuffle-block "
            f"{np.bincount(self._shards).max()} they need one or two, and images are shuffled among eight"
        )


def check_shards(names: Sequence[str], sizes: Sequence[int]) -> None:
    """ValueError where a name may lead elsewhere or is there twice, or a size cannot be a shard's."""
    if len(set(names)) < len(names):
        raise ValueError("a shard is there twice")
    for name, size in zip(names, sizes, strict=True):
        if not _SHARD.fullmatch(name) or not 0 < size <= MAX_SHARD_BYTES:
            raise ValueError(f"{name[:80]!a} of {size:,} bytes is no shard")


def check_images(parts: Sequence[ShardedImages], classes: int, names: Sequence[str], sizes: Sequence[int]) -> None:
    """ValueError unless all images have a class, and lie apart and within the shards, of these names and sizes."""
    columns = zip(*(part.columns for part in parts), strict=True)
    shards, offsets, lengths, _, labels = (np.concatenate([np.asarray(own) for own in column]) for column in columns)
    if (
        shards.max() >= len(names) or labels.max() >= classes or offsets.min() < 0
        or not 0 < lengths.min() <= lengths.max() <= MAX_BYTES
    ):  # fmt: skip
        raise ValueError("an image has no class, shard or place")
    order = np.lexsort((offsets, shards))
    shards, offsets = shards[order], offsets[order]
    is_last = np.append(shards[1:] != shards[:-1], True)
    ends = np.where(is_last, np.array(sizes)[shards], np.append(offsets[1:], 0))  # where the next one begins
    if (wrong := offsets > ends - lengths[order]).any():
        raise ValueError(f"{names[shards[wrong.argmax()]]} has images that overlap, or end outside of it")


def parse_index(content: bytes) -> dict[str, Any]:
    """What an index has. The rows of each part, which are most of it, are left as text where that can be; see `rows`.

    ValueError where it is no object in JSON.
    """
    try:
        texts = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        samples = msgspec.json.decode(texts.pop("samples"), type=dict[str, msgspec.Raw])
        return {name: parse_json(bytes(text)) for name, text in texts.items()} | {"samples": samples}
    except (KeyError, ValueError, RecursionError):  # json reads some that msgspec does not, and says what is wrong
        index = parse_json(content)
        if not isinstance(index, dict):
            raise ValueError("it holds no object") from None
        return index


def rows(part: Any) -> Iterator[Any]:
    """The rows of a part that parse_index has found, some at a time. TypeError, ValueError: they are none."""
    if not isinstance(part, msgspec.Raw):
        yield part
        return
    text, start, opening = memoryview(part), 0, b""
    while between := _BETWEEN.search(text, start + PARSED):
        try:
            some = msgspec.json.decode(opening + text[start : between.start(1)] + b"]")
        except (ValueError, RecursionError):
            break
        yield some
        start, opening = between.end(1), b"["
    yield parse_json(opening + text[start:])
