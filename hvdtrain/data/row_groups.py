"""Images in the row groups of Parquet files, as training sees them: a million of them take some 20 MB."""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.spec import AbstractBufferedFile

from hvdtrain.data.folder import ManyImages
from hvdtrain.data.image import MAX_BYTES
from hvdtrain.data.kept_files import kept
from hvdtrain.data.parquet_footer import MAX_GROUP_BYTES, Group
from hvdtrain.data.sampling import packing_order
from hvdtrain.errors import Failure

KEPT_BYTES = 2**28  # of images that a process keeps, the last row groups that were read: those of some 16 blocks
AT_ONCE = 4  # row groups that are read at the same time


class RangeFile(AbstractBufferedFile):
    """A file of one of fsspec's file systems, for pyarrow, which takes more than it asked for without looking. With
    cache_type `none` each read is one request: nothing is read ahead.
    """

    def _fetch_range(self, start: int, end: int) -> bytes:
        """OSError where other than the bytes that were asked for come."""
        end = min(end, self.size)
        content: bytes = self.fs.cat_file(self.path, start=start, end=end)
        if len(content) != end - start:
            raise OSError(
                f"{len(content):,} bytes came and not {end - start:,}: the file was changed, or its server sends no "
                "parts of files (then copy the data set to a disk)"
            )
        return content


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file of images.

    Attributes:
        filesystem: fsspec's, on which it is.
        size: in bytes.
        metadata: its footer, as pyarrow has it.
        image: the name of the column of images.
        groups: its row groups.
    """

    filesystem: Any
    path: str
    size: int
    metadata: Any
    image: str
    groups: list[Group]

    def read(self, number: int, source: Any) -> Any:
        """The encoded images of a row group, as pyarrow's array of bytes. ValueError where there are fewer, or more
        bytes than may be.

        Args:
            source: a path, or a file that can be read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        group = self.groups[number]
        # A dictionary can have one long image stand for each row: no more is unpacked at a time than may be in all.
        batch_rows = max(1, MAX_GROUP_BYTES // max(1, group.size, group.unpacked))
        reader = pq.ParquetFile(source, metadata=self.metadata, memory_map=True, page_checksum_verification=True)
        batches, unpacked = [], 0
        for batch in reader.iter_batches(
            batch_rows, row_groups=[number], columns=[f"{self.image}.bytes"], use_threads=False
        ):
            [images] = batch.column(0).flatten()
            batches.append(images)
            unpacked += images.nbytes
            if unpacked > MAX_GROUP_BYTES:
                raise ValueError(f"more than {MAX_GROUP_BYTES:,} bytes of images in a row group")
        images = pa.chunked_array(batches)
        if images.null_count:
            raise ValueError(f"{images.null_count:,} of {len(images):,} images of a row group have no bytes")
        if len(images) != group.rows:
            raise ValueError(f"{len(images):,} images in a row group of {group.rows:,}")
        return images


class RowGroups:
    """Reads images of Parquet files. Those of the last row groups are kept in memory, up to KEPT_BYTES. Of a file on
    this host in which images stand as they are, where each lies is kept in place of them.

    Args:
        cache: the folder in which whole files are kept; None where they are not.
    """

    def __init__(self, files: Sequence[ParquetFile], cache: Path | None) -> None:
        self.files, self.cache = files, cache
        self.lock, self.reading = threading.Lock(), threading.Semaphore(AT_ONCE)
        self.kept: OrderedDict[tuple[int, int], Future[Any]] = OrderedDict()
        self.sizes: dict[tuple[int, int], int] = {}  # of those of them that have been read
        self.places: dict[tuple[int, int], tuple[Path, np.ndarray]] = {}

    def image(self, file: int, group: int, row: int) -> bytes:
        """The encoded image. Whatever pyarrow or the file system raises where it cannot be read."""
        if place := self.places.get((file, group)):
            try:
                with place[0].open("rb") as opened:
                    start, end = place[1][row].tolist()
                    return os.pread(opened.fileno(), end - start, start)
            except FileNotFoundError:  # somebody has emptied the cache
                self.places.pop((file, group), None)
        image = self._images(file, group)[row].as_buffer()
        if image.size > MAX_BYTES:
            raise ValueError(f"it has {image.size:,} bytes, too many for an image")
        return image.to_pybytes()

    def _images(self, file: int, group: int) -> Any:
        """All images of a row group. Of threads that want the same, one reads and the others wait."""
        key = file, group
        with self.lock:
            is_mine = key not in self.kept
            found = self.kept.setdefault(key, Future())
            self.kept.move_to_end(key)
        if is_mine:
            try:
                with self.reading:
                    found.set_result(self._read(file, group))
            except BaseException as error:
                found.set_exception(error)
            self._keep(key, found)
        return found.result()

    def _keep(self, key: tuple[int, int], found: Future[Any]) -> None:
        """What was read, in place of what was not asked for longest."""
        with self.lock:
            if found.exception() or key in self.places:
                del self.kept[key]
                return
            self.sizes[key] = found.result().nbytes
            while sum(self.sizes.values()) > KEPT_BYTES and len(self.sizes) > 1:
                oldest = next(key for key in self.kept if key in self.sizes)
                del self.kept[oldest], self.sizes[oldest]

    def _read(self, number: int, group: int) -> Any:
        file, local = self.files[number], None  # where it is on this host: downloaded, where it is to be kept
        if getattr(file.filesystem, "local_file", False):
            local = Path(file.path)
        elif self.cache:
            local = kept(self.cache / f"{number:05d}.parquet", file.filesystem, file.path, file.size)
        images = file.read(group, local or RangeFile(file.filesystem, file.path, cache_type="none", size=file.size))
        if local and file.groups[group].is_plain:
            places = _places(local, file.groups[group], images)
            if places is not None:
                self.places[number, group] = local, places
        return images


def _places(path: Path, group: Group, images: Any) -> np.ndarray | None:
    """Where in the file each image of a row group begins and ends: [images, 2] int64. Each is compared; None where they
    do not stand there as they are. In Parquet's PLAIN encoding one follows the other after 4 bytes, its length, and
    perhaps a page's header.
    """
    places = np.empty((len(images), 2), np.int64)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end, last = group.start, group.start + group.size
        for number, image in enumerate(images):
            encoded = image.as_py()
            start = end + 4
            if content[start : start + len(encoded)] != encoded:
                start = content.find(encoded, end, last)
            if start < 0 or len(encoded) > MAX_BYTES:
                return None
            end = start + len(encoded)
            places[number] = start, end
    return places


@dataclass(frozen=True)
class ParquetImage:
    """One image in a Parquet file.

    Attributes:
        row: which it is in its part, from 0. Images that are read in this order are read row group by row group.
    """

    part: "ParquetImages" = field(repr=False)
    row: int

    @property
    def name(self) -> str:
        return f"{self.part.name}-{self.row}"

    def read_bytes(self) -> bytes:
        """The encoded image. Failure where it cannot be read."""
        file, group, row = self.part.place(self.row)
        try:
            return self.part.groups.image(file, group, row)
        except Exception as error:  # each of fsspec's file systems raises its own
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise Failure(f"cannot read {self}: {reason}") from None

    def __str__(self) -> str:
        file, group, row = self.part.place(self.row)
        return f"image {row} of row group {group} of {self.part.groups.files[file].path}"


class ParquetImages(ManyImages):
    """The images of one part of a data set in Parquet: (image, index of its class) each.

    Training images are taken to stand in the file as `packing_order` has them, whoever wrote it: so blocks of samples
    that come near each other lie near each other (sampling.permutation), and a folder that was packed has the order it
    had. Those of other parts stand in order.

    Args:
        name: train, validation or test.
        files: numbers of the files of this part among those of `groups`.
        labels: the class of each row, [rows] int32.
    """

    def __init__(self, name: str, groups: RowGroups, files: Sequence[int], labels: np.ndarray) -> None:
        self.name, self.groups, self._labels = name, groups, labels
        self.places = [(file, group) for file in files for group in range(len(groups.files[file].groups))]
        self.starts = np.cumsum([0, *(groups.files[file].groups[group].rows for file, group in self.places)])
        self.rows = np.arange(len(labels), dtype=np.int32)
        if name == "train":
            self.rows[packing_order(len(labels))] = np.arange(len(labels), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, index: int) -> tuple[ParquetImage, int]:
        row = int(self.rows[index])
        return ParquetImage(self, row), int(self._labels[row])

    def place(self, row: int) -> tuple[int, int, int]:
        """The number of a row's file, that of its row group in it, and that of the row in the group."""
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        return *self.places[number], row - int(self.starts[number])

    def labels(self) -> np.ndarray:
        """The class of each image, [images] int64."""
        return self._labels[self.rows].astype(np.int64)

    def image_bytes(self) -> int:
        return sum(self.groups.files[file].groups[group].unpacked for file, group in self.places)
