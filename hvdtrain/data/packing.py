"""`hvdtrain data pack`: writes a data set in Parquet as Hugging Face does, to any URL that fsspec supports."""

import hashlib
import json
import os
import re
from typing import Any

import msgspec

from hvdtrain.data import image
from hvdtrain.data.folder import ImageFolder, ManyImages
from hvdtrain.data.identity import identity, sample_hash
from hvdtrain.data.packed import Packing, errors_as_usage, open_filesystem, packing_at, parquet_files
from hvdtrain.data.sampling import packing_order
from hvdtrain.data.storage import Progress
from hvdtrain.errors import UsageError
from hvdtrain.formatting import some_of

GROUP_BYTES = 2**24  # of a row group, about: it is read at once
GROUP_ROWS = range(32, 1025)  # images of a row group, few or many bytes as they may have
ORDER = ("validation", "test", "train")  # of writing: without its training part nobody takes a data set for one
OURS = re.compile(r"data/(train|validation|test)-\d{5}-of-\d{5}\.parquet")


def pack(data: ImageFolder, url: str, file_bytes: int, force: bool, progress: Progress) -> int:
    """Write a data set's files. Training images are mixed as sampling.packing_order has them, the others in order.

    Nothing is done if that is at the URL. While it is written, or where writing was cut short, it is not read as a
    data set, because files are missing.

    Args:
        file_bytes: of a file on average; images differ.

    Returns:
        How many images a row group has.

    Raises:
        UsageError: something else is packed at the URL, fsspec does not support it, or writing failed; or these are no
            stored images.
        Failure: an image cannot be read.
    """
    if not isinstance(data.train, ManyImages):
        raise UsageError(f"{data.root} is made anew by each job: there is nothing to pack")
    filesystem, root = open_filesystem(url)
    parts = {part: getattr(data, part) for part in ORDER}
    mean = max(1, sum(part.image_bytes() for part in parts.values() if part) // sum(map(len, parts.values())))
    rows = min(max(GROUP_BYTES // mean, GROUP_ROWS[0]), GROUP_ROWS[-1])
    per_file = max(1, file_bytes // mean // rows) * rows
    dataset_hash = identity(data)
    tested = "" if data.known_hash else sample_hash(data.test)
    key = hashlib.sha256(f"{dataset_hash} {tested} {rows} {per_file}".encode()).hexdigest()[:16]
    packing = Packing(dataset_hash, image.native_side(data), key)
    schema = _schema(data.classes, packing)
    with errors_as_usage(url):
        old = [path.removeprefix(f"{root}/") for path in parquet_files(filesystem, root)]
        if foreign := [name for name in old if not OURS.fullmatch(name)]:
            raise UsageError(f"{url} holds other Parquet files ({some_of(foreign)}): give another URL")
        if old and not force:
            if packing_at(url) == packing:
                return rows
            raise UsageError(f"{url} holds something else: give another URL, or replace it with --force")
        if old and open_filesystem(str(data.root)) == (filesystem, root):
            raise UsageError(f"{url} is what is to be packed: give another URL")
        there = os.listdir(root) if getattr(filesystem, "local_file", False) and os.path.isdir(root) else []
        if others := [name for name in sorted(there) if name not in ("data", "README.md") and name[0] != "."]:
            raise UsageError(f"{url} holds something else too ({some_of(others)}): name a new folder")
        for name in old:
            filesystem.rm_file(f"{root}/{name}")
        filesystem.makedirs(f"{root}/data", exist_ok=True)
        total, done = sum(map(len, parts.values())), 0
        for part, samples in parts.items():
            order = packing_order(len(samples)).tolist() if part == "train" else range(len(samples))
            starts = range(0, len(samples), per_file)
            for number, start in enumerate(starts):
                chosen = [samples[i] for i in order[start : start + per_file]]
                content = _make_file(chosen, rows, schema)
                filesystem.pipe_file(f"{root}/data/{part}-{number:05d}-of-{len(starts):05d}.parquet", content)
                done += len(chosen)
                progress(done, total)
    return rows


def _schema(classes: tuple[str, ...], packing: Packing) -> Any:
    """pyarrow's, with Hugging Face's features."""
    import pyarrow as pa

    features = {"image": {"_type": "Image"}, "label": {"names": list(classes), "_type": "ClassLabel"}}
    told = {"huggingface": json.dumps({"info": {"features": features}}), "hvdtrain": msgspec.json.encode(packing)}
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.schema({"image": kind, "label": pa.int64()}, told)


def _make_file(samples: list[tuple[Any, int]], rows: int, schema: Any) -> Any:
    """A file. Equal samples give equal bytes. Images stand in it as they are: compressing them again gains nothing, and
    of a file on a disk each can be read by itself (row_groups.RowGroups).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, schema, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True
    ) as writer:
        for start in range(0, len(samples), rows):
            some = samples[start : start + rows]
            images = [{"bytes": image.read(sample), "path": sample.name} for sample, _ in some]
            writer.write_table(pa.table([images, [label for _, label in some]], schema), rows)
    return sink.getvalue().to_pybytes()
