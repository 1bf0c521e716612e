"""`hvdtrain data pack`: writes a data set in Parquet, to any URL that fsspec supports.

The layout is Hugging Face's; see data.parquet_files.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain.base.config.untrusted import is_utf8
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import some_of
from hvdtrain.data import image
from hvdtrain.data.filesystems import SUFFIX, errors_as_usage, open_filesystem, parquet_files
from hvdtrain.data.folder import ImageFolder, ManyImages
from hvdtrain.data.identity import identity, sample_hash
from hvdtrain.data.image_side import native_side
from hvdtrain.data.names import not_utf8
from hvdtrain.data.packed import packing_at
from hvdtrain.data.parquet_files import Packing
from hvdtrain.data.sampling import packing_order
from hvdtrain.data.storage import Progress

GROUP_BYTES = 2**24  # bytes of a row group, about; a row group is read at once
GROUP_ROWS = range(32, 1025)  # images that a row group may have, however large or small they are
# The order in which parts are written. Until the training part is there, readers find no data set.
ORDER = ("validation", "test", "train")
UNFINISHED = ".part"  # behind the name of a file that is not to be read yet
OURS = re.compile(r"data/(train|validation|test)-\d{5}-of-\d{5}\.parquet")


def pack(data: ImageFolder, url: str, file_bytes: int, force: bool, progress: Progress) -> int:
    """Writes a data set's files.

    Training images are in the order of sampling.packing_order; other images keep their order.

    Nothing is done if the same data set is packed at the URL. Another one stays until all new files
    are written, under other names. While the new files are renamed, readers refuse the URL, because
    files are missing or of two packings.

    Args:
        data: The data set.
        url: The folder or URL.
        file_bytes: Bytes of a file, on average.
        force: Whether a data set that was packed there before is replaced.
        progress: Called after each file.

    Returns:
        The number of images in a row group.

    Raises:
        UsageError: The URL has other files, fsspec does not support it, or writing failed; or the
            data set has no stored images.
        Failure: An image cannot be read.
    """
    if not isinstance(data.train, ManyImages):
        raise UsageError(f"{data.root} is made anew by each job: there is nothing to pack")
    _check_names(data.classes)
    filesystem, root = open_filesystem(url)
    parts = {part: getattr(data, part) for part in ORDER}
    total_bytes = sum(part.image_bytes() for part in parts.values() if part)
    mean = max(1, total_bytes // sum(map(len, parts.values())))
    rows = min(max(GROUP_BYTES // mean, GROUP_ROWS[0]), GROUP_ROWS[-1])
    per_file = max(1, file_bytes // mean // rows) * rows
    dataset_hash = identity(data)
    tested = "" if data.known_hash else sample_hash(data.test)
    key = hashlib.sha256(f"{dataset_hash} {tested} {rows} {per_file}".encode()).hexdigest()[:16]
    packing = Packing(dataset_hash, native_side(data), key)
    schema = _schema(data.classes, packing)
    with errors_as_usage(url):
        old = [path.removeprefix(f"{root}/") for path in parquet_files(filesystem, root)]
        foreign = [name for name in old if not OURS.fullmatch(name)]
        if foreign:
            raise UsageError(
                f"{url} holds other Parquet files ({some_of(foreign)}): give another URL"
            )
        if old and not force:
            if packing_at(url) == packing:
                return rows
            raise UsageError(
                f"{url} holds something else: give another URL, or replace it with --force"
            )
        if old and open_filesystem(str(data.root)) == (filesystem, root):
            raise UsageError(f"{url} is what is to be packed: give another URL")
        others = _other_names(filesystem, root)
        if others:
            raise UsageError(
                f"{url} holds something else too ({some_of(others)}): name a new folder"
            )
        filesystem.makedirs(f"{root}/data", exist_ok=True)
        new = _write(filesystem, root, parts, rows, per_file, schema, progress)
        for name in new:
            filesystem.mv(f"{root}/{name}{UNFINISHED}", f"{root}/{name}")
        for name in sorted(set(old) - set(new)):
            filesystem.rm_file(f"{root}/{name}")
    return rows


def _check_names(classes: Sequence[str]) -> None:
    """Raises UsageError if a name of a class is not UTF-8, as text in Parquet is."""
    for name in classes:
        if not is_utf8(name):
            raise UsageError(not_utf8(name))


def _other_names(filesystem: Any, root: str) -> list[str]:
    """Returns what a local folder has beside packed files, a README and hidden files."""
    if not getattr(filesystem, "local_file", False) or not os.path.isdir(root):
        return []
    names = sorted(os.listdir(root))
    return [name for name in names if name not in ("data", "README.md") and name[0] != "."]


def _write(
    filesystem: Any,
    root: str,
    parts: Mapping[str, Any],
    rows: int,
    per_file: int,
    schema: Any,
    progress: Progress,
) -> list[str]:
    """Writes all files, with UNFINISHED behind their names. Removes them if that fails.

    Args:
        filesystem: The fsspec file system.
        root: The folder in it.
        parts: The samples of each part.
        rows: Images of a row group.
        per_file: Images of a file.
        schema: pyarrow's schema.
        progress: Called after each file.

    Returns:
        The names of the files below root, without UNFINISHED.
    """
    names: list[str] = []
    total = sum(map(len, parts.values()))
    done = 0
    try:
        for part, samples in parts.items():
            order = packing_order(len(samples)).tolist() if part == "train" else range(len(samples))
            starts = range(0, len(samples), per_file)
            for number, start in enumerate(starts):
                chosen = [samples[i] for i in order[start : start + per_file]]
                content = _make_file(chosen, rows, schema)
                names.append(f"data/{part}-{number:05d}-of-{len(starts):05d}{SUFFIX}")
                unfinished = f"{root}/{names[-1]}{UNFINISHED}"
                if getattr(
                    filesystem, "local_file", False
                ):  # it may be a link to a file of somebody's
                    Path(unfinished).unlink(missing_ok=True)
                filesystem.pipe_file(unfinished, content)
                done += len(chosen)
                progress(done, total)
    except BaseException:
        for name in names:
            with contextlib.suppress(Exception):  # each fsspec file system has errors of its own
                filesystem.rm_file(f"{root}/{name}{UNFINISHED}")
        raise
    return names


def _schema(classes: tuple[str, ...], packing: Packing) -> Any:
    """Returns pyarrow's schema, with Hugging Face's features and the packing as metadata."""
    import pyarrow as pa

    features = {
        "image": {"_type": "Image"},
        "label": {"names": list(classes), "_type": "ClassLabel"},
    }
    metadata = {
        "huggingface": json.dumps({"info": {"features": features}}),
        "hvdtrain": msgspec.json.encode(packing),
    }
    image_type = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.schema({"image": image_type, "label": pa.int64()}, metadata)


def _make_file(samples: list[tuple[Any, int]], rows: int, schema: Any) -> Any:
    """Returns the content of a file. Equal samples give equal bytes.

    Images are not compressed again: that would gain nothing, and from an uncompressed file on a
    disk each image can be read alone (row_groups.RowGroups).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        for start in range(0, len(samples), rows):
            group = samples[start : start + rows]
            images = [{"bytes": image.read(sample), "path": sample.name} for sample, _ in group]
            labels = [label for _, label in group]
            writer.write_table(pa.table([images, labels], schema), rows)
    return sink.getvalue().to_pybytes()
