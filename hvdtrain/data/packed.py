"""Data sets in Parquet, in a folder or at any URL that fsspec supports.

data.parquet_files describes their layout, which is Hugging Face's; data.parquet_process is the
process that reads them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.base.errors import UsageError
from hvdtrain.data.bad_images import bad_rows
from hvdtrain.data.filesystems import CACHED, DEPTH, SUFFIX, open_filesystem
from hvdtrain.data.folder import (
    ImageFolder,
    lacking_by_labels,
    stands_in,
    usable_size,
)
from hvdtrain.data.held_out import Chosen, hash_with, hold_out, in_place
from hvdtrain.data.parquet_files import Packing
from hvdtrain.data.parquet_process import ParquetReader
from hvdtrain.data.row_groups import ParquetImages, RowGroups
from hvdtrain.data.storage import cache_root


def is_packed(folder: Path) -> bool:
    """Returns whether this is a Parquet file, or a folder with some, up to DEPTH levels deep."""
    if folder.is_file():
        return folder.suffix == SUFFIX
    patterns = ["*/" * depth + "*" + SUFFIX for depth in range(DEPTH)]
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def read(url: str, label: str = "", validation: float = 0.0, skip_bad: bool = False) -> ImageFolder:
    """Lists the images in the Parquet files at a URL or in a folder, or in one file.

    Args:
        url: The URL, folder or file.
        label: The column of classes; empty to find it.
        validation: The share of training images to validate on, where there is a training part
            alone.
        skip_bad: Whether damaged images are found first, and left out.

    Raises:
        UsageError: The URL cannot be reached, or holds no data set.
        Unread: A file cannot be read, with `skip_bad`.
    """
    reader = ParquetReader(url, label)
    listing = reader.listing
    packing = listing.packing
    dataset_hash = packing.dataset_hash if packing else listing.dataset_hash
    parts = _Parts(_images(url, reader), dataset_hash, [], [])
    if "validation" not in parts.images and "test" in parts.images:
        parts.images["validation"] = parts.images.pop("test")
        parts.notes.append(stands_in("the part `test`"))
    if skip_bad:
        parts.leave_out_bad()
    parts.choose_validation(url, validation, listing.classes)
    for part in ("train", "validation"):
        if not parts.images.get(part):
            raise UsageError(
                f"{url} has no images in a part `{part}`: Parquet files belong in "
                f"data/train-*{SUFFIX} and data/validation-*{SUFFIX}"
            )
    parts.notes += _lacking(parts.images, listing.classes)
    return ImageFolder(
        root=url,
        classes=listing.classes,
        train=parts.images["train"],
        validation=parts.images["validation"],
        test=parts.images.get("test", ()),
        known_hash=parts.dataset_hash,
        image_size=usable_size(packing.image_size) if packing else 0,
        bad=tuple(parts.bad),
        notes=tuple(parts.notes),
    )


def _images(url: str, reader: ParquetReader) -> dict[str, Any]:
    """Returns the images of each part that a reader has listed."""
    listing = reader.listing
    filesystem, root = open_filesystem(url)
    cache = None
    if url.startswith(CACHED):
        version = listing.packing.key if listing.packing else listing.dataset_hash
        place = f"{filesystem.unstrip_protocol(root)} {version}"
        cache = cache_root() / "parquet" / hashlib.sha256(place.encode()).hexdigest()[:16]
    groups = RowGroups(reader, filesystem, cache)
    images = {}
    for part, files in listing.parts.items():
        labels = np.frombuffer(listing.labels[part], np.int32)
        images[part] = ParquetImages(part, groups, files, labels)
    return images


@dataclass
class _Parts:
    """The parts of a data set, as they are chosen.

    Attributes:
        images: The images of each part.
        dataset_hash: The hash of what is chosen.
        bad: The names of damaged images that are left out.
        notes: Lines for the user.
    """

    images: dict[str, Any]
    dataset_hash: str
    bad: list[str]
    notes: list[str]

    def leave_out_bad(self) -> None:
        """Leaves out the images that cannot be decoded."""
        left_out = {}
        for part, images in self.images.items():
            rows = bad_rows(images, f"{self.dataset_hash} {part}")
            if not rows:
                continue
            left_out[part] = [images[row][0].row for row in rows]
            self.bad += [str(images[row][0]) for row in rows]
            is_kept = np.ones(len(images), bool)
            is_kept[rows] = False
            if part == "train":
                self.images[part] = in_place(images, is_kept)
            else:
                self.images[part] = Chosen(images, np.flatnonzero(is_kept))
        if left_out:
            self.dataset_hash = hash_with(self.dataset_hash, left_out)

    def choose_validation(self, url: str, share: float, classes: Sequence[str]) -> None:
        """Holds out a share of the training images, where there are no others to validate on.

        Raises:
            UsageError: There are none, and the share is 0; or a class has one image.
        """
        if "validation" in self.images:
            if share:
                self.notes.append(f"{url} has images to validate on: --validation holds none out")
            return
        train = self.images.get("train")
        if not train:
            return
        if not share:
            raise UsageError(
                f"{url} has images to train on alone, and none to validate on: hold some of them "
                f"out, as with --validation 0.2{_or_the_folder(url)}"
            )
        self.images["train"], self.images["validation"] = hold_out(train, share, classes)
        self.dataset_hash = hash_with(self.dataset_hash, share)
        held_out = len(self.images["validation"])
        self.notes.append(f"{held_out:,} training images are held out to validate on")


def _lacking(images: Mapping[str, Any], classes: Sequence[str]) -> list[str]:
    """Returns lines about classes without images to train on, or to validate on."""
    trained_on = images["train"].labels()
    validated_on = images["validation"].labels()
    return [
        *lacking_by_labels("train", trained_on, classes, so="nothing can be learned of them"),
        *lacking_by_labels("validation", validated_on, classes),
    ]


def _or_the_folder(url: str) -> str:
    """Returns a clause for a message about one file; empty for a folder."""
    if not url.endswith(SUFFIX):
        return ""
    return f"; or name the folder that has a validation part too, {url.rpartition('/')[0]}"


def packing_at(url: str) -> Packing | None:
    """Returns what `data pack` wrote at a URL.

    None where another program wrote the Parquet files, or where some are missing or damaged.
    """
    with suppress(UsageError):
        return ParquetReader(url).listing.packing
    return None
