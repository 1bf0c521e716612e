"""Data sets in Parquet, in a folder or at any URL that fsspec supports.

data.parquet_files describes their layout, which is Hugging Face's; data.parquet_process is the
process that reads them.
"""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.base.errors import UsageError
from hvdtrain.data.filesystems import CACHED, DEPTH, SUFFIX, open_filesystem
from hvdtrain.data.folder import ImageFolder, usable_size
from hvdtrain.data.held_out import hash_with, hold_out
from hvdtrain.data.parquet_files import Packing
from hvdtrain.data.parquet_process import ParquetReader
from hvdtrain.data.row_groups import ParquetImages, RowGroups
from hvdtrain.data.storage import cache_root


def is_packed(folder: Path) -> bool:
    """Returns whether a folder holds Parquet files, up to DEPTH levels deep."""
    patterns = ["*/" * depth + "*" + SUFFIX for depth in range(DEPTH)]
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def read(url: str, label: str = "", validation: float = 0.0) -> ImageFolder:
    """Lists the images in the Parquet files at a URL or in a folder.

    Args:
        url: The URL or folder.
        label: The column of classes; empty to find it.
        validation: The share of training images to validate on, where there is a training part
            alone.

    Raises:
        UsageError: The URL cannot be reached, or holds no data set.
    """
    reader = ParquetReader(url, label)
    listing = reader.listing
    packing = listing.packing
    dataset_hash = packing.dataset_hash if packing else listing.dataset_hash
    filesystem, root = open_filesystem(url)
    cache = None
    if url.startswith(CACHED):
        version = packing.key if packing else dataset_hash
        place = f"{filesystem.unstrip_protocol(root)} {version}"
        cache = cache_root() / "parquet" / hashlib.sha256(place.encode()).hexdigest()[:16]
    groups = RowGroups(reader, filesystem, cache)
    images: dict[str, Any] = {}
    for part, files in listing.parts.items():
        labels = np.frombuffer(listing.labels[part], np.int32)
        images[part] = ParquetImages(part, groups, files, labels)
    if "validation" not in images and "test" in images:
        images["validation"] = images.pop("test")
    notes = []
    if validation and "validation" in images:
        notes.append(f"{url} has images to validate on: --validation holds none out")
    elif validation and images.get("train"):
        train = images["train"]
        images["train"], images["validation"] = hold_out(train, validation, listing.classes)
        dataset_hash = hash_with(dataset_hash, validation)
        notes.append(f"{len(images['validation']):,} training images are held out to validate on")
    elif "validation" not in images and images.get("train"):
        raise UsageError(
            f"{url} has images to train on alone, and none to validate on: hold some of them out, "
            "as with --validation 0.2"
        )
    for part in ("train", "validation"):
        if not images.get(part):
            raise UsageError(
                f"{url} has no images in a part `{part}`: Parquet files belong in "
                f"data/train-*{SUFFIX} and data/validation-*{SUFFIX}"
            )
    return ImageFolder(
        root=url,
        classes=listing.classes,
        train=images["train"],
        validation=images["validation"],
        test=images.get("test", ()),
        known_hash=dataset_hash,
        image_size=usable_size(packing.image_size) if packing else 0,
        notes=tuple(notes),
    )


def packing_at(url: str) -> Packing | None:
    """Returns what `data pack` wrote at a URL.

    None where another program wrote the Parquet files, or where some are missing or damaged.
    """
    with suppress(UsageError):
        return ParquetReader(url).listing.packing
    return None
