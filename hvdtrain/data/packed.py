"""Data sets in Parquet as Hugging Face writes them, in a folder or at any URL that fsspec supports: what they hold.

`data/train-00000-of-00005.parquet` has a column `image`, {bytes, path}, and one `label`; the names of the classes are
in the schema's metadata, under `huggingface` (https://huggingface.co/docs/hub/datasets-image). At the start only the
footers and the labels of all files are read.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from hvdtrain.data.folder import PART_WORDS, ImageFolder, usable_size
from hvdtrain.data.parquet_footer import row_groups
from hvdtrain.data.row_groups import ParquetFile, ParquetImages, RangeFile, RowGroups
from hvdtrain.data.selection import PARTS
from hvdtrain.data.storage import cache_root
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import some_of

CACHED = "simplecache::"  # fsspec's prefix for URLs to cache. We do that ourselves: fsspec's is not safe with threads
DEPTH = 2  # folders below the URL in which files are looked for, its own included
SUFFIX = ".parquet"
# Of parts: whole words in the names of files or of their folders.
WORDS = {word: part for part, words in PART_WORDS.items() for word in words}
WORD = re.compile(rf"(?<![^-._ 0-9/])({'|'.join(WORDS)})(?![^-._ 0-9/])")
NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")
OPENED = 32  # files that are opened at a time: over a network each waits for the server most of the time
# What is believed of a stranger's files. A label takes 4 bytes of memory in each worker.
MAX_FILE_BYTES, MAX_FOOTER_BYTES, MAX_FOOTERS_BYTES = 2**34, 2**24, 2**28
MAX_ROWS, MAX_CLASSES = 2**27, 100_000
UNLABELLED = -1  # Hugging Face's label of images whose class nobody tells


class Packing(msgspec.Struct):
    """What `data pack` writes of a data set into each file's metadata, under `hvdtrain`, in JSON.

    Attributes:
        dataset_hash: as in a run's manifest; see data.identity.
        image_size: as of an ImageFolder.
        key: differs where other images, or other numbers of them in a file, are packed.
    """

    dataset_hash: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]+:[0-9a-f]{1,64}\Z")]
    image_size: int
    key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]


class Columns(msgspec.Struct, frozen=True):
    """The names of the columns of images and of classes, and those of the classes; None where they are not told."""

    image: str
    label: str
    classes: tuple[str, ...] | None


class Opened(msgspec.Struct):
    """A file, and what its footer and its labels, [rows] int64, say."""

    file: ParquetFile
    footer: bytes
    columns: Columns
    packing: Packing | None
    labels: np.ndarray


def is_packed(folder: Path) -> bool:
    """Whether a folder holds Parquet files."""
    return any(next(folder.glob("*/" * depth + "*" + SUFFIX), None) for depth in range(DEPTH))


def read(url: str) -> ImageFolder:
    """List the images in the Parquet files at a URL or in a folder. UsageError where it cannot be reached, or holds no
    data set.
    """
    filesystem, root, parts, opened = _look(url)
    columns, packing = _agreed(list(opened.values()), url)
    dataset_hash = packing.dataset_hash if packing else _footers_hash(root, opened)
    cache = None
    if url.startswith(CACHED):
        place = f"{filesystem.unstrip_protocol(root)} {packing.key if packing else dataset_hash}"
        cache = cache_root() / "parquet" / hashlib.sha256(place.encode()).hexdigest()[:16]
    labels = {part: np.concatenate([opened[path].labels for path in files]) for part, files in parts.items()}
    if "test" in labels and (labels["test"] == UNLABELLED).all():
        del labels["test"]
    classes = _classes(columns, labels, url)
    groups = RowGroups([one.file for one in opened.values()], cache)
    numbers = {path: number for number, path in enumerate(opened)}
    images = {
        part: ParquetImages(part, groups, [numbers[path] for path in parts[part]], of_part.astype(np.int32))
        for part, of_part in labels.items()
    }
    if "validation" not in images and "test" in images:
        images["validation"] = images.pop("test")
    if missing := [part for part in ("train", "validation") if not images.get(part)]:
        raise UsageError(
            f"{url} has no images in a part `{missing[0]}`: Parquet files belong in data/train-*{SUFFIX} and "
            f"data/validation-*{SUFFIX}"
        )
    side = usable_size(packing.image_size) if packing else 0
    return ImageFolder(url, classes, images["train"], images["validation"], images.get("test", ()), dataset_hash, side)


def packing_at(url: str) -> Packing | None:
    """What is packed at a URL; None where other Parquet files are, or some are missing or damaged."""
    with suppress(UsageError):
        return _agreed(list(_look(url)[-1].values()), url)[1]
    return None


def _look(url: str) -> tuple[Any, str, dict[str, list[str]], dict[str, Opened]]:
    """The file system and the path in it; the files of each part, and all of them opened."""
    filesystem, root = open_filesystem(url)
    with errors_as_usage(url):
        parts = _parts(filesystem, root, url)
        paths = [path for files in parts.values() for path in files]
        return filesystem, root, parts, dict(zip(paths, _open_all(filesystem, paths), strict=True))


def open_filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system for the URL or the path, and the path in it."""
    import fsspec

    with errors_as_usage(url):
        filesystem, root = fsspec.core.url_to_fs(url.removeprefix(CACHED))
        return filesystem, root.rstrip("/")


def parquet_files(filesystem: Any, root: str) -> list[str]:
    """Paths of all Parquet files in a folder and those in it, sorted."""
    found = filesystem.find(root, maxdepth=DEPTH)
    return sorted(path for path in found if path.endswith(SUFFIX) and path != root)


@contextmanager
def errors_as_usage(url: str) -> Iterator[None]:
    """Turn whatever a file system or pyarrow raises into a UsageError of one line."""
    try:
        yield
    except (UsageError, Failure):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        reason += ", with `uv pip install`" * isinstance(error, ImportError)
        raise UsageError(f"{url} cannot be used: {reason}") from None


def _parts(filesystem: Any, root: str, url: str) -> dict[str, list[str]]:
    """The files of each part by name. UsageError where there is no training part, or a file of a part is missing."""
    parts: dict[str, list[str]] = {}
    for path in parquet_files(filesystem, root):
        if words := WORD.findall(path.removeprefix(f"{root}/").removesuffix(SUFFIX)):
            parts.setdefault(WORDS[words[-1]], []).append(path)
    if "train" not in parts:
        if filesystem.exists(f"{root}/index.json"):
            raise UsageError(
                f"{url} holds tar shards, which are no longer read: pack the folder again, `hvdtrain data pack FOLDER "
                f"{url}`"
            )
        filesystem.ls(root)  # which says why where it cannot be reached
        raise UsageError(
            f"{url} holds no data set: there is no data/train-00000-of-00001{SUFFIX}, or the like; make one with "
            "`hvdtrain data pack`"
        )
    numbered = [match for files in parts.values() for path in files if (match := NUMBERED.fullmatch(path[:-8]))]
    for (name, total), count in Counter((match[1], match[3]) for match in numbered).items():
        if count != int(total):
            raise UsageError(
                f"{url} has {count} of the {int(total)} files {name.removeprefix(root)}-*{SUFFIX}: copy or pack it anew"
            )
    return {part: parts[part] for part in PARTS if part in parts}


def _open_all(filesystem: Any, paths: list[str]) -> Iterator[Opened]:
    """ValueError where a file is not what it should be, or all are more than is believed."""
    footers = rows = 0
    with ThreadPoolExecutor(OPENED, thread_name_prefix="footers") as pool:
        for start in range(0, len(paths), OPENED):
            for opened in pool.map(lambda path: _open(filesystem, path), paths[start : start + OPENED]):
                footers, rows = footers + len(opened.footer), rows + len(opened.labels)
                if footers > MAX_FOOTERS_BYTES or rows > MAX_ROWS:
                    raise ValueError(f"{footers:,} bytes of footers and {rows:,} rows, and there are more")
                yield opened


def _open(filesystem: Any, path: str) -> Opened:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        size = int(filesystem.size(path))
        footer = _footer(RangeFile(filesystem, path, cache_type="none", size=size))
        metadata = pq.read_metadata(pa.BufferReader(footer))
        schema = metadata.schema.to_arrow_schema()
        columns = _columns(schema)
        groups = row_groups(footer, columns.image, columns.label, size - len(footer))
        file = ParquetFile(filesystem, path, size, metadata, columns.image, groups)
        reader = pq.ParquetFile(RangeFile(filesystem, path, cache_type="none", size=size), metadata=metadata)
        column = reader.read([columns.label], use_threads=False).column(0).cast(pa.int64())
        rows = sum(group.rows for group in groups)
        if column.null_count or len(column) != rows:
            raise ValueError(f"{len(column) - column.null_count:,} labels of {rows:,} rows")
        packing = (schema.metadata or {}).get(b"hvdtrain")
        return Opened(
            file, footer, columns, msgspec.json.decode(packing, type=Packing) if packing else None,
            np.concatenate([np.zeros(0, np.int64), *map(np.from_dlpack, column.chunks)]),  # to_numpy imports pandas
        )  # fmt: skip
    except Exception as error:  # of fsspec's file systems each raises its own, and so does pyarrow
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"{path} cannot be read as a data set's: {reason}") from None


def _footer(file: RangeFile) -> bytes:
    """The end of a Parquet file, from where its metadata begins. ValueError where there is none."""
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


def _columns(schema: Any) -> Columns:
    """What the columns are, by Hugging Face's features, or else by name. ValueError where they are no images and
    classes.
    """
    import pyarrow as pa

    try:
        told = (schema.metadata or {}).get(b"huggingface")
        features = json.loads(told)["info"]["features"] if told else {}
        kinds = {name: feature.get("_type") for name, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("what its metadata has under `huggingface` are no features") from None
    image = _named("image", [name for name in schema.names if kinds.get(name) == "Image"], schema)
    label = _named("label", [name for name in schema.names if kinds.get(name) == "ClassLabel"], schema)
    kind = schema.field(image).type
    if not pa.types.is_struct(kind) or not any(
        one.name == "bytes" and (pa.types.is_binary(one.type) or pa.types.is_large_binary(one.type)) for one in kind
    ):
        raise ValueError(f"its column `{image}` is {kind!s:.80} and not {{bytes, path}}")
    if not pa.types.is_integer(schema.field(label).type):
        raise ValueError(f"its column `{label}` is {schema.field(label).type!s:.80} and not an integer")
    names = features[label].get("names") if kinds.get(label) == "ClassLabel" else None
    return Columns(image, label, msgspec.convert(names, tuple[str, ...]) if names is not None else None)


def _named(wanted: str, of_its_kind: list[str], schema: Any) -> str:
    """The only column of a kind, or of several, and where no kinds are told, the one that is called so."""
    if len(of_its_kind) == 1:
        return of_its_kind[0]
    if schema.names.count(wanted) == 1:
        return wanted
    raise ValueError(f"it has no column `{wanted}` but {some_of(of_its_kind or schema.names)}")


def _agreed(opened: list[Opened], url: str) -> tuple[Columns, Packing | None]:
    """What all files say. UsageError where they do not say the same."""
    first = opened[0]
    for one in opened:
        if one.columns != first.columns:
            raise UsageError(f"{url}: {one.file.path} and {first.file.path} have other columns or classes")
        if one.packing != first.packing:
            raise UsageError(f"{url} has files of two packings: pack it anew with --force")
    return first.columns, first.packing


def _classes(columns: Columns, labels: Mapping[str, np.ndarray], url: str) -> tuple[str, ...]:
    """The classes' names; where the files have none, their numbers. UsageError where an image is of none of them."""
    found = np.concatenate(list(labels.values()))
    lowest, highest = int(found.min(initial=0)), int(found.max(initial=0))
    if not len(found):
        raise UsageError(f"{url} has no rows")
    number = len(columns.classes) if columns.classes is not None else min(highest + 1, MAX_CLASSES)
    if lowest < 0 or highest >= number:
        raise UsageError(f"{url}: a label is {lowest if lowest < 0 else highest}, and there may be {number:,} classes")
    if number < 2:
        raise UsageError(f"{url} has fewer than two classes: there is nothing to tell apart")
    classes = columns.classes or tuple(map(str, range(number)))
    if len(set(classes)) < number:
        raise UsageError(f"{url} has two classes of one name")
    return classes


def _footers_hash(root: str, opened: Mapping[str, Opened]) -> str:
    """`parquet:` and a hash of names, sizes and footers of all files; 64 hex digits."""
    total = hashlib.sha256()
    for path, one in opened.items():
        name = os.fsencode(path.removeprefix(root))
        total.update(b"%s\0%d\0%d\0" % (name, one.file.size, len(one.footer)) + one.footer)
    return f"parquet:{total.hexdigest()}"
