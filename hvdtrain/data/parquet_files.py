"""Listing and reading data sets in Parquet, in the layout that Hugging Face writes.

`data/train-00000-of-00005.parquet` has a column `image`, {bytes, path}, and a column `label`. The
names of the classes are in the schema's metadata, under `huggingface`
(https://huggingface.co/docs/hub/datasets-image). Images may be plain bytes, and labels text. At the
start only the footers and the labels of all files are read.

Only the reader process (data.parquet_process) calls this module: pyarrow ends the process for some
damaged files, and some small files unpack to more bytes than the host has memory.
"""

import hashlib
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from fsspec.asyn import sync
from fsspec.spec import AbstractBufferedFile

from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import some_of
from hvdtrain.data.filesystems import (
    SUFFIX,
    errors_as_usage,
    open_filesystem,
    parquet_files,
    reason_of,
)
from hvdtrain.data.folder import PART_WORDS
from hvdtrain.data.image import MAX_BYTES
from hvdtrain.data.selection import PARTS

# The part that a word stands for. Whole words count, in the names of files and of their folders.
PART_OF_WORD: dict[str, str] = {}
for _part, _words in PART_WORDS.items():
    PART_OF_WORD.update(dict.fromkeys(_words, _part))
WORD = re.compile(rf"(?<![^-._ 0-9/])({'|'.join(PART_OF_WORD)})(?![^-._ 0-9/])")
NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")
# Files that are opened at a time. Over a network each waits for the server most of the time.
OPEN_AT_ONCE = 32
CHUNK_BYTES = 2**16  # of an HTTP response that are read at once
# Limits of files, which may come from anybody. A label takes 4 bytes of memory in each worker.
MAX_FILE_BYTES = 2**34
MAX_FOOTER_BYTES = 2**24
MAX_FOOTERS_BYTES = 2**28
MAX_ROWS = 2**27
MAX_FILE_ROWS = 2**24
MAX_CLASSES = 100_000
MAX_GROUP_BYTES = 2**29  # of a row group's images, and of its labels
UNLABELLED = -1  # the label that Hugging Face gives to images without a known class


class Packing(msgspec.Struct):
    """The metadata that `data pack` writes into each file, in JSON under the key `hvdtrain`.

    Attributes:
        dataset_hash: The hash that a run's manifest has; see data.identity.
        image_size: The default side of training images; see ImageFolder.
        key: 16 hex digits that depend on the images and on how many of them a file has.
    """

    dataset_hash: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]+:[0-9a-f]{1,64}\Z")]
    image_size: int
    key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]


class RowGroup(msgspec.Struct, frozen=True, array_like=True):
    """A row group of images.

    Attributes:
        rows: The number of images.
        start: The offset in the file at which the images begin.
        size: Bytes of the images in the file.
        unpacked: Bytes of the images without compression.
        is_plain: Whether the images are neither compressed nor in a dictionary.
    """

    rows: int
    start: int
    size: int
    unpacked: int
    is_plain: bool


class FileOfImages(msgspec.Struct, frozen=True):
    """A Parquet file: the path in its file system, the size in bytes, and the row groups."""

    path: str
    size: int
    groups: list[RowGroup]


class Listing(msgspec.Struct, frozen=True, tag=True):
    """The classes, files and labels of a data set.

    Attributes:
        classes: The names of the classes.
        files: All files, part after part.
        parts: For each part the indices of its files in `files`.
        labels: For each part the class of each row, [rows] int32, as bytes.
        packing: The metadata of `data pack`; None where another program wrote the files.
        dataset_hash: `parquet:` and 64 hex digits, from the names, sizes and footers of all files.
    """

    classes: tuple[str, ...]
    files: list[FileOfImages]
    parts: dict[str, list[int]]
    labels: dict[str, bytes]
    packing: Packing | None
    dataset_hash: str


@dataclass(frozen=True)
class Columns:
    """The names of the columns.

    Attributes:
        image: The path of the column that has the bytes of images, `image.bytes` or `image`.
        label: The column of classes.
        is_text: Whether labels are text.
        classes: The names of the classes; None where the metadata has none.
    """

    image: str
    label: str
    is_text: bool
    classes: tuple[str, ...] | None


@dataclass(frozen=True)
class OpenedFile:
    """A file of which the footer and the labels have been read.

    Attributes:
        labels: The class of each row, [rows] int32; where labels are text, an index of `texts`.
        texts: The texts that stand for classes, sorted; empty where labels are numbers.
        lowest: The lowest label; 0 where there are no rows.
        highest: The highest label; 0 where there are no rows.
    """

    file: "ParquetFile"
    footer: bytes
    columns: Columns
    packing: Packing | None
    labels: np.ndarray
    texts: list[str]
    lowest: int
    highest: int


class RangeFile(AbstractBufferedFile):
    """A file of an fsspec file system that returns exactly the requested range, or raises.

    pyarrow does not check whether a read returns more bytes than it requested. With cache_type
    `none` each read is one request: nothing is read ahead.
    """

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Returns the bytes from `start` to before `end`, which is cut at the file's size.

        Raises:
            OSError: The server sends more or fewer bytes.
        """
        end = min(end, self.size)
        if "http" in self.fs.protocol:
            content = sync(self.fs.loop, _http_range, self.fs, self.path, start, end)
        else:
            content = self.fs.cat_file(self.path, start=start, end=end)
        if len(content) != end - start:
            raise OSError(
                f"{len(content):,} bytes came and not {end - start:,}: the file was changed"
            )
        return bytes(content)


async def _http_range(filesystem: Any, url: str, start: int, end: int) -> bytearray:
    """Returns the bytes from `start` to before `end`, or fewer where the response ends early.

    Raises:
        OSError: The server does not support range requests, or sends more than the range. At most
            CHUNK_BYTES beyond the range have been read then.
    """
    session = await filesystem.set_session()
    options = dict(filesystem.kwargs)
    range_headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    options["headers"] = {**options.get("headers", {}), **range_headers}
    content = bytearray()
    async with session.get(filesystem.encode_url(url), **options) as response:
        response.raise_for_status()
        if response.status != 206:
            raise OSError("its server sends no parts of files (then copy the data set to a disk)")
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            content += chunk
            if len(content) > end - start:
                raise OSError(f"more than the {end - start:,} bytes come that were asked for")
    return content


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file of images.

    Attributes:
        filesystem: The fsspec file system that has the file.
        path: The path in that file system.
        size: Bytes of the file.
        metadata: The footer, as pyarrow's FileMetaData.
        image: The path of the column that has the bytes of images.
        groups: The row groups.
    """

    filesystem: Any
    path: str
    size: int
    metadata: Any
    image: str
    groups: list[RowGroup]

    def open(self) -> RangeFile:
        """Opens the file in its file system."""
        return RangeFile(self.filesystem, self.path, cache_type="none", size=self.size)

    def read(self, number: int, source: Any) -> list[Any]:
        """Reads the encoded images of a row group.

        Args:
            number: The index of the row group.
            source: The path of a local copy, or an open file.

        Returns:
            Batches of images, each a pyarrow array of large binary. An image that is null has no
            bytes.

        Raises:
            ValueError: There are more or fewer images than the footer says, or none of several has
                bytes, or all have more than MAX_GROUP_BYTES.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        group = self.groups[number]
        # One long image in a dictionary can stand for every row. A batch is so small that even then
        # it unpacks to no more than a whole row group may have.
        batch_rows = max(1, MAX_GROUP_BYTES // max(1, group.size, group.unpacked))
        reader = pq.ParquetFile(
            source, metadata=self.metadata, memory_map=True, page_checksum_verification=True
        )
        batches = []
        rows = 0
        missing = 0
        unpacked = 0
        for batch in reader.iter_batches(
            batch_rows, row_groups=[number], columns=[self.image], use_threads=False
        ):
            images = batch.column(0)
            if pa.types.is_struct(images.type):
                [images] = images.flatten()
            images = images.cast(pa.large_binary())
            if images.null_count:
                missing += images.null_count
                images = images.fill_null(b"")
            batches.append(images)
            rows += len(images)
            unpacked += images.nbytes
            if unpacked > MAX_GROUP_BYTES:
                raise ValueError(f"more than {MAX_GROUP_BYTES:,} bytes of images in a row group")
        if rows != group.rows:
            raise ValueError(f"{rows:,} images in a row group of {group.rows:,}")
        if missing == rows > 1:
            raise ValueError(
                f"none of {rows:,} images of a row group has bytes, as where files have the paths of "
                "images alone: write them with the images in them"
            )
        return batches


def list_dataset(url: str, label: str = "") -> tuple[Listing, list[ParquetFile]]:
    """Lists the classes, files and labels of the data set at a URL or in a folder.

    Args:
        url: The URL or folder.
        label: The column of classes; empty to find it.

    Returns:
        The listing, and all files in the order of `Listing.files`.

    Raises:
        UsageError: The URL cannot be reached, or holds no data set.
    """
    filesystem, root = open_filesystem(url)
    with errors_as_usage(url):
        paths_of_parts = _find_parts(filesystem, root, url)
        paths = list(chain.from_iterable(paths_of_parts.values()))
        files = list(_open_all(filesystem, paths, label))
    columns, packing = _agreed(files, url)
    if columns.is_text:
        columns, files = _numbered(columns, files)
    parts = _labelled_parts(paths_of_parts, files)
    used = [files[index] for index in chain.from_iterable(parts.values())]
    labels = {}
    for part, indices in parts.items():
        labels[part] = b"".join(files[index].labels.tobytes() for index in indices)
    opened = [each.file for each in files]
    listing = Listing(
        classes=_classes(columns, used, url),
        files=[FileOfImages(file.path, file.size, file.groups) for file in opened],
        parts=parts,
        labels=labels,
        packing=None if label else packing,
        dataset_hash=f"parquet:{_hash_of_footers(files, root, label)}",
    )
    return listing, opened


def _find_parts(filesystem: Any, root: str, url: str) -> dict[str, list[str]]:
    """Finds the paths of each part's files, by the words in their names.

    One file, or files without such words, are a training part.

    Raises:
        UsageError: There is no training part, or a file of a part is missing.
    """
    if root.endswith(SUFFIX) and filesystem.isfile(root):
        _check_is_whole(root, url)
        return {"train": [root]}
    parts: dict[str, list[str]] = {}
    paths = parquet_files(filesystem, root)
    for path in paths:
        words = WORD.findall(path.removeprefix(f"{root}/").removesuffix(SUFFIX))
        if words:
            parts.setdefault(PART_OF_WORD[words[-1]], []).append(path)
    if paths and not parts:
        parts["train"] = paths
    if "train" not in parts:
        if filesystem.exists(f"{root}/index.json"):
            raise UsageError(
                f"{url} holds tar shards, which are no longer read: pack the folder again, "
                f"`hvdtrain data pack FOLDER {url}`"
            )
        filesystem.ls(root)  # raises the reason where the folder cannot be reached
        raise UsageError(
            f"{url} holds no data set: there is no data/train-00000-of-00001{SUFFIX}, or the like; "
            "make one with `hvdtrain data pack`"
        )
    _check_none_missing(chain.from_iterable(parts.values()), root, url)
    return {part: parts[part] for part in PARTS if part in parts}


def _check_is_whole(path: str, url: str) -> None:
    """Raises UsageError if a file's name, `…-00000-of-00005`, says that there are others."""
    match = NUMBERED.fullmatch(path.removesuffix(SUFFIX))
    if match and int(match[3]) > 1:
        raise UsageError(
            f"{url} is one of {int(match[3])} files of a data set: name their folder, "
            f"{url.rpartition('/')[0]}"
        )


def _check_none_missing(paths: Iterable[str], root: str, url: str) -> None:
    """Raises UsageError if files named `…-00000-of-00005` are fewer than their names say."""
    counts: Counter[tuple[str, str]] = Counter()
    for path in paths:
        if match := NUMBERED.fullmatch(path.removesuffix(SUFFIX)):
            counts[match[1], match[3]] += 1
    for (name, total), count in counts.items():
        if count != int(total):
            raise UsageError(
                f"{url} has {count} of the {int(total)} files {name.removeprefix(root)}-*{SUFFIX}: "
                "copy or pack it anew"
            )


def _labelled_parts(
    paths_of_parts: dict[str, list[str]], files: list[OpenedFile]
) -> dict[str, list[int]]:
    """Returns the indices of each part's files, without a test part that has no labels."""
    index_of = {each.file.path: index for index, each in enumerate(files)}
    parts = {}
    for part, paths in paths_of_parts.items():
        parts[part] = [index_of[path] for path in paths]
    tested = [files[index] for index in parts.get("test", ())]
    if tested and all(file.lowest == file.highest == UNLABELLED for file in tested):
        del parts["test"]
    return parts


def _hash_of_footers(files: list[OpenedFile], root: str, label: str) -> str:
    """Returns the SHA-256 of all files' names, sizes and footers, and of the column that is named.

    It has 64 hex digits.
    """
    total = hashlib.sha256(label.encode())
    for each in files:
        name = os.fsencode(each.file.path.removeprefix(root))
        total.update(b"%s\0%d\0%d\0" % (name, each.file.size, len(each.footer)))
        total.update(each.footer)
    return total.hexdigest()


def _numbered(columns: Columns, files: list[OpenedFile]) -> tuple[Columns, list[OpenedFile]]:
    """Turns labels that are text into numbers: the classes are all texts, sorted.

    Raises:
        UsageError: There are too many.
    """
    names = sorted({text for file in files for text in file.texts})
    if len(names) > MAX_CLASSES:
        raise UsageError(
            f"column `{columns.label}` has {len(names):,} different texts, too many for classes: "
            "name another with --label"
        )
    number_of = {name: number for number, name in enumerate(names)}
    numbered = []
    for file in files:
        numbers = np.array([number_of[text] for text in file.texts], np.int32)
        labels = numbers[file.labels] if len(file.labels) else file.labels
        highest = int(labels.max(initial=0))
        numbered.append(replace(file, labels=labels, lowest=0, highest=highest))
    return replace(columns, classes=tuple(names)), numbered


def _open_all(filesystem: Any, paths: list[str], label: str) -> Iterator[OpenedFile]:
    """Opens files, OPEN_AT_ONCE at a time, and yields them in order.

    Args:
        filesystem: The fsspec file system.
        paths: The files.
        label: The column of classes; empty to find it.

    Raises:
        UsageError: A file is damaged, or is not one of a data set.
        ValueError: All files have more than MAX_FOOTERS_BYTES of footers, or MAX_ROWS rows.
    """
    footers = 0
    rows = 0
    with ThreadPoolExecutor(OPEN_AT_ONCE, thread_name_prefix="footers") as pool:
        for start in range(0, len(paths), OPEN_AT_ONCE):
            some_paths = paths[start : start + OPEN_AT_ONCE]
            for file in pool.map(partial(_open, filesystem, label), some_paths):
                footers += len(file.footer)
                rows += len(file.labels)
                if footers > MAX_FOOTERS_BYTES or rows > MAX_ROWS:
                    raise ValueError(
                        f"{footers:,} bytes of footers and {rows:,} rows, and there are more"
                    )
                yield file


def _open(filesystem: Any, label: str, path: str) -> OpenedFile:
    """Reads a file's footer and labels. Raises UsageError if that fails."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        size = int(filesystem.size(path))
        footer = _footer(RangeFile(filesystem, path, cache_type="none", size=size))
        metadata = pq.read_metadata(pa.BufferReader(footer))
        schema = metadata.schema.to_arrow_schema()
        columns = _columns(schema, label)
        groups = row_groups(metadata, columns.image, columns.label, size - len(footer))
        file = ParquetFile(filesystem, path, size, metadata, columns.image, groups)
        labels, texts = _read_labels(file, columns)
        lowest = int(labels.min()) if len(labels) else 0
        highest = int(labels.max()) if len(labels) else 0
        encoded_packing = (schema.metadata or {}).get(b"hvdtrain")
        packing = msgspec.json.decode(encoded_packing, type=Packing) if encoded_packing else None
        labels = labels.astype(np.int32)
        return OpenedFile(file, footer, columns, packing, labels, texts, lowest, highest)
    except Exception as error:  # pyarrow and each fsspec file system have errors of their own
        raise UsageError(f"{path} cannot be read as a data set's: {reason_of(error)}") from None


def _read_labels(file: ParquetFile, columns: Columns) -> tuple[np.ndarray, list[str]]:
    """Reads the class of each row.

    Returns:
        Numbers, [rows] int64; and where labels are text, the texts that they are indices of.

    Raises:
        ValueError: Rows have no label, or too many different texts.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    reader = pq.ParquetFile(file.open(), metadata=file.metadata)
    column = reader.read([columns.label], use_threads=False).column(0)
    rows = sum(group.rows for group in file.groups)
    if len(column) != rows:
        raise ValueError(f"{len(column):,} labels of {rows:,} rows")
    if column.null_count:
        first = pc.index(column.is_null(), True).as_py()
        raise ValueError(
            f"{column.null_count:,} of {rows:,} rows have no label (null) in column "
            f"`{columns.label}`, row {first:,} first: take these rows out, or name another column "
            "with --label"
        )
    texts: list[str] = []
    if columns.is_text:
        column = column.cast(pa.large_string())
        distinct = column.unique()
        if len(distinct) > MAX_CLASSES:
            raise ValueError(
                f"column `{columns.label}` has {len(distinct):,} different texts, too many for "
                "classes"
            )
        texts = distinct.to_pylist()
        column = pc.index_in(column, distinct)
    # Without pyarrow's to_numpy, which needs pandas.
    chunks = map(np.from_dlpack, column.cast(pa.int64()).chunks)
    return np.concatenate([np.zeros(0, np.int64), *chunks]), texts


def _footer(file: RangeFile) -> bytes:
    """Returns the end of a Parquet file, from where its metadata begins.

    Raises:
        ValueError: The file has no footer, or one of more than MAX_FOOTER_BYTES.
    """
    if not 12 <= file.size <= MAX_FILE_BYTES:
        raise ValueError(f"it has {file.size:,} bytes")
    file.seek(-min(file.size, 2**16), 2)
    tail = file.read()
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != b"PAR1" or length > file.size - 4:
        raise ValueError("it is no Parquet file, or a part of one")
    if length > MAX_FOOTER_BYTES:
        raise ValueError(f"its footer has {length:,} bytes")
    if length > len(tail):
        file.seek(-length, 2)
        tail = file.read()
    return tail[-length:]


def row_groups(metadata: Any, image: str, label: str, end: int) -> list[RowGroup]:
    """Returns the row groups of a file with columns of images and labels.

    Args:
        metadata: pyarrow's FileMetaData.
        image: The path of the column that has the bytes of images.
        label: The name of the column of labels.
        end: The offset in the file at which the footer begins.

    Raises:
        ValueError: A row group exceeds a limit of this module, or does not lie in the file.
    """
    columns = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    groups = []
    rows = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows += group.num_rows
        if not 0 <= group.num_rows <= rows <= MAX_FILE_ROWS:
            raise ValueError(f"row group {number} has {group.num_rows:,} rows")
        labels = group.column(columns[label])
        images = group.column(columns[image])
        _column_of_group(labels, group.num_rows, end, number)
        groups.append(_column_of_group(images, group.num_rows, end, number))
    return groups


def _column_of_group(chunk: Any, rows: int, end: int, number: int) -> RowGroup:
    """Returns the place and size of one column of a row group, after checking them.

    Args:
        chunk: pyarrow's ColumnChunkMetaData.
        rows: Rows that the row group has.
        end: The offset in the file at which the footer begins.
        number: The index of the row group, for messages.
    """
    start = chunk.data_page_offset
    size = chunk.total_compressed_size
    unpacked = chunk.total_uncompressed_size
    if chunk.has_dictionary_page:
        start = min(start, chunk.dictionary_page_offset)
    if not 0 <= unpacked <= MAX_GROUP_BYTES:
        raise ValueError(f"row group {number} has {unpacked:,} bytes of a column")
    if rows and (start < 4 or size < 0 or start + size > end):
        raise ValueError(f"row group {number} does not lie in the file")
    if chunk.num_values != rows:
        raise ValueError(f"row group {number} has {chunk.num_values:,} values in {rows:,} rows")
    is_plain = chunk.compression == "UNCOMPRESSED" and not chunk.has_dictionary_page
    return RowGroup(rows, start, size, unpacked, is_plain)


def _columns(schema: Any, label: str) -> Columns:
    """Finds the columns of images and labels.

    They have Hugging Face's features, or else the names `image` and `label`. Images may also be in
    the only column of a type that holds them.

    Args:
        schema: pyarrow's.
        label: The column of classes; empty to find it.

    Raises:
        ValueError: There are no such columns, or their types are others.
    """
    import pyarrow as pa

    features = _features(schema)
    kinds = {name: feature.get("_type") for name, feature in features.items()}
    images = [name for name in schema.names if kinds.get(name) == "Image"]
    labels = [name for name in schema.names if kinds.get(name) == "ClassLabel"]
    if not images and "image" not in schema.names:
        images = [field.name for field in schema if _path_of_bytes(field)]
    image = _choose_column("image", images, schema)
    path = _path_of_bytes(schema.field(image))
    if not path:
        raise ValueError(
            f"its column `{image}` is {schema.field(image).type!s:.80}: neither {{bytes, path}} "
            "nor bytes"
        )
    if not label:
        label = _choose_column("label", labels, schema)
    elif schema.names.count(label) != 1:
        raise ValueError(f"it has no column `{label}` but {some_of(schema.names)}")
    label_type = schema.field(label).type
    if pa.types.is_dictionary(label_type):
        label_type = label_type.value_type
    is_text = pa.types.is_string(label_type) or pa.types.is_large_string(label_type)
    if pa.types.is_boolean(label_type):
        return Columns(path, label, False, ("false", "true"))
    if not is_text and not pa.types.is_integer(label_type):
        raise ValueError(
            f"its column `{label}` is {label_type!s:.80}, neither integers nor text: name another "
            "with --label"
        )
    names = features.get(label, {}).get("names") if label in labels else None
    classes = msgspec.convert(names, tuple[str, ...]) if names is not None else None
    return Columns(path, label, is_text, classes)


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Returns Hugging Face's features by column; none where there is no such metadata.

    Raises:
        ValueError: The metadata under `huggingface` is not what that library writes.
    """
    encoded = (schema.metadata or {}).get(b"huggingface")
    if not encoded:
        return {}
    try:
        features = json.loads(encoded)["info"]["features"]
        return {name: each for name, each in features.items() if isinstance(each, dict)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("what its metadata has under `huggingface` are no features") from None


def _path_of_bytes(field: Any) -> str:
    """Returns the path of the column that has the bytes of images; empty if a field has none.

    A field has them if it is binary, or a struct that has a binary field `bytes`.
    """
    import pyarrow as pa

    def is_bytes(column_type: Any) -> bool:
        return pa.types.is_binary(column_type) or pa.types.is_large_binary(column_type)

    if is_bytes(field.type):
        return str(field.name)
    if not pa.types.is_struct(field.type):
        return ""
    types = [inner.type for inner in field.type if inner.name == "bytes"]
    return f"{field.name}.bytes" if any(map(is_bytes, types)) else ""


def _choose_column(name: str, candidates: list[str], schema: Any) -> str:
    """Returns the only candidate; if there are none or several, the column with the given name.

    Args:
        name: `image` or `label`.
        candidates: Columns that have the wanted kind of feature.
        schema: pyarrow's.

    Raises:
        ValueError: There is neither.
    """
    if len(candidates) == 1:
        return candidates[0]
    if schema.names.count(name) == 1:
        return name
    remedy = ": name the one of classes with --label" if name == "label" else ""
    raise ValueError(f"it has no column `{name}` but {some_of(candidates or schema.names)}{remedy}")


def _agreed(files: list[OpenedFile], url: str) -> tuple[Columns, Packing | None]:
    """Returns the columns and the packing of all files. Raises UsageError if they differ."""
    first = files[0]
    for other in files:
        if other.columns != first.columns:
            raise UsageError(
                f"{url}: {other.file.path} and {first.file.path} have other columns or classes"
            )
        if other.packing != first.packing:
            raise UsageError(f"{url} has files of two packings: pack it anew with --force")
    return first.columns, first.packing


def _classes(columns: Columns, files: list[OpenedFile], url: str) -> tuple[str, ...]:
    """Returns the names of the classes; where the files have none, their numbers.

    Raises:
        UsageError: There are no rows, a label is no class, or there are not two distinct classes.
    """
    lowest = min(file.lowest for file in files)
    highest = max(file.highest for file in files)
    if not any(len(file.labels) for file in files):
        raise UsageError(f"{url} has no rows")
    number = min(highest + 1, MAX_CLASSES) if columns.classes is None else len(columns.classes)
    if lowest < 0 or highest >= number:
        outside = lowest if lowest < 0 else highest
        raise UsageError(f"{url}: a label is {outside}, and there may be {number:,} classes")
    if number < 2:
        raise UsageError(f"{url} has fewer than two classes: there is nothing to tell apart")
    classes = columns.classes or tuple(map(str, range(number)))
    if len(set(classes)) < number:
        raise UsageError(f"{url} has two classes of one name")
    return classes


def bounds_of(images: Any) -> tuple[np.ndarray, Any]:
    """Returns where the images of an array lie, without a copy.

    Args:
        images: A pyarrow array of large binary.

    Returns:
        The offsets at which the images begin, and at last that at which the last one ends,
        [images + 1] int64; and the buffer that has their bytes.
    """
    _, encoded_offsets, content = images.buffers()
    offsets = np.frombuffer(encoded_offsets, np.int64)
    return offsets[images.offset : images.offset + len(images) + 1], memoryview(content or b"")


def check_sizes(lengths: np.ndarray) -> None:
    """Raises ValueError if one of these lengths of images, in bytes, exceeds MAX_BYTES."""
    longest = int(lengths.max(initial=0))
    if longest > MAX_BYTES:
        raise ValueError(f"an image has {longest:,} bytes, too many for an image")


def places_of(path: Path, group: RowGroup, batches: list[Any]) -> np.ndarray | None:
    """Finds the images of an uncompressed row group in the file, and compares each.

    In Parquet's PLAIN encoding the length of an image, 4 bytes, precedes it. A page's header may
    lie between two images.

    Returns:
        The offsets in the file at which each image begins and ends, [images, 2] int64; None where
        an image is not found.
    """
    places: list[tuple[int, int]] = []
    with (
        path.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        end = group.start
        last = group.start + group.size
        for image in chain.from_iterable(batches):
            encoded = image.as_py()
            start = end + 4
            if content[start : start + len(encoded)] != encoded:
                start = content.find(encoded, end, last)
            if start < 0:
                return None
            end = start + len(encoded)
            places.append((start, end))
    return np.array(places, np.int64).reshape(-1, 2)
