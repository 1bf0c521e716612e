"""Images in the row groups of Parquet files, as training sees them.

A million images take some 20 MB of memory, without their contents.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.filesystems import reason_of
from hvdtrain.data.folder import ManyImages
from hvdtrain.data.image import Unread
from hvdtrain.data.kept_files import kept
from hvdtrain.data.parquet_process import ImagesInMemory, InFile, ParquetReader
from hvdtrain.data.sampling import packing_order

# Bytes of images that a process keeps in memory. Of row groups as `data pack` writes them these are
# 16, twice as many as training mixes at a time (sampling.SPREAD).
KEPT_BYTES = 2**28


class RowGroups:
    """Reader of images in Parquet files, with a cache of the row groups that were used last.

    The cache has at most KEPT_BYTES of images. Of uncompressed files on this host it has the places
    of the images in the file instead.

    Args:
        reader: The process that reads the files.
        filesystem: The fsspec file system that has them.
        cache: The folder in which whole files are kept; None if they are not kept.
    """

    def __init__(self, reader: ParquetReader, filesystem: Any, cache: Path | None) -> None:
        self.reader = reader
        self.files = reader.listing.files
        self.filesystem = filesystem
        self.cache = cache
        self.lock = threading.Lock()
        self.kept: OrderedDict[tuple[int, int], Future[InFile | ImagesInMemory]] = OrderedDict()
        self.sizes: dict[tuple[int, int], int] = {}  # bytes of kept row groups that have been read
        self.in_files: dict[tuple[int, int], InFile] = {}

    def image(self, file: int, group: int, row: int) -> bytes:
        """Returns an encoded image.

        Args:
            file: The index of the file.
            group: The index of the row group in the file.
            row: The index of the image in the row group.

        Raises:
            Failure: The image cannot be read. The file system may raise errors of its own.
        """
        found = self.in_files.get((file, group)) or self._images(file, group)
        try:
            return found.image(row)
        except FileNotFoundError:  # the cache on the disk has been emptied
            self.in_files.pop((file, group), None)
        return self._images(file, group).image(row)

    def _images(self, file: int, group: int) -> InFile | ImagesInMemory:
        """Returns all images of a row group, after reading it if it is not in the cache.

        Of several threads that need the same row group one reads it, and the others wait.
        """
        key = file, group
        with self.lock:
            is_first = key not in self.kept
            future = self.kept.setdefault(key, Future())
            self.kept.move_to_end(key)
        if is_first:
            try:
                future.set_result(self._read(file, group))
            except BaseException as error:
                future.set_exception(error)
            self._keep(key, future)
        return future.result()

    def _keep(self, key: tuple[int, int], future: Future[InFile | ImagesInMemory]) -> None:
        """Keeps what was read, and drops the least recently used row groups beyond KEPT_BYTES."""
        with self.lock:
            images = None if future.exception() else future.result()
            if not isinstance(images, ImagesInMemory):
                del self.kept[key]
                if images:
                    self.in_files[key] = images
                return
            self.sizes[key] = len(images.images)
            while sum(self.sizes.values()) > KEPT_BYTES and len(self.sizes) > 1:
                oldest = next(key for key in self.kept if key in self.sizes)
                del self.kept[oldest]
                del self.sizes[oldest]

    def _read(self, number: int, group: int) -> InFile | ImagesInMemory:
        file = self.files[number]
        local = None
        if getattr(self.filesystem, "local_file", False):
            local = Path(file.path)
        elif self.cache:
            cached = self.cache / f"{number:05d}.parquet"
            local = kept(cached, self.filesystem, file.path, file.size)
        return self.reader.read(number, group, local)


@dataclass(frozen=True)
class ParquetImage:
    """One image in a Parquet file.

    Attributes:
        row: The index in the part, from 0, in the order of files and row groups.
    """

    part: "ParquetImages" = field(repr=False)
    row: int

    @property
    def name(self) -> str:
        return f"{self.part.name}-{self.row}"

    def read_bytes(self) -> bytes:
        """Returns the encoded image. Raises Unread if it cannot be read."""
        file, group, row = self.part.place(self.row)
        try:
            return self.part.groups.image(file, group, row)
        except Exception as error:  # each fsspec file system has errors of its own
            raise Unread(f"cannot read {self}: {reason_of(error)}") from None

    @property
    def row_group(self) -> tuple[str, int]:
        """What the image is read with, in words, and how many images that has."""
        number, group, _ = self.part.place(self.row)
        file = self.part.groups.files[number]
        return f"row group {group} of {file.path}", file.groups[group].rows

    def __str__(self) -> str:
        _, _, row = self.part.place(self.row)
        return f"image {row} of {self.row_group[0]}"


class ParquetImages(ManyImages):
    """The images of one part of a data set in Parquet, as a sequence of (image, class) pairs.

    Sample i of the training part is the row that `packing_order` put there. So a folder keeps its
    order when it is packed, and samples that training visits together (sampling.permutation) lie in
    few row groups. In other parts sample i is row i.

    Args:
        name: `train`, `validation` or `test`.
        groups: The reader of the row groups.
        files: The indices of this part's files among all files of the data set.
        labels: The class of each row, [rows] int32.
    """

    def __init__(
        self, name: str, groups: RowGroups, files: Sequence[int], labels: np.ndarray
    ) -> None:
        self.name = name
        self.groups = groups
        self._labels = labels
        self.places: list[tuple[int, int]] = []  # of each row group: its file, its index there
        rows_of_groups = []
        for file in files:
            for index, group in enumerate(groups.files[file].groups):
                self.places.append((file, index))
                rows_of_groups.append(group.rows)
        self.starts = np.cumsum([0, *rows_of_groups])
        self.rows = np.arange(len(labels), dtype=np.int32)
        if name == "train":
            self.rows[packing_order(len(labels))] = np.arange(len(labels), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, index: int) -> tuple[ParquetImage, int]:
        row = int(self.rows[index])
        return ParquetImage(self, row), int(self._labels[row])

    def place(self, row: int) -> tuple[int, int, int]:
        """Returns the indices of a row's file, of its row group in that file, and in that group."""
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        return *self.places[number], row - int(self.starts[number])

    def labels(self) -> np.ndarray:
        """Returns the class of each image, [images] int64."""
        return self._labels[self.rows].astype(np.int64)

    def image_bytes(self) -> int:
        """Returns the bytes of all encoded images, as the files' footers say."""
        return sum(self.groups.files[file].groups[group].unpacked for file, group in self.places)
