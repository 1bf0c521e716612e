"""Image folders: ROOT/TrainData/<class>/<image>, ROOT/ValidationData/<class>/<image>, and perhaps ROOT/TestData."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError

TRAIN, VALIDATION, TEST = "TrainData", "ValidationData", "TestData"
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")  # in any case
SHAPE = f"images belong in {TRAIN}/<class>/ and {VALIDATION}/<class>/"

# (image, index of its class) each. An image is a Path, or has read_bytes and name as a Path does.
Samples = tuple[tuple[Any, int], ...]


@dataclass(frozen=True)
class ImageFolder:
    """What a folder holds: sorted class names, and the samples of each part, sorted by class and file name.

    Attributes:
        root: the folder, or the URL where its images are packed in shards.
        known_hash: the content_hash, where it is known: of the folder that was packed, or found before.
    """

    root: Any
    classes: tuple[str, ...]
    train: Samples
    validation: Samples
    test: Samples = ()
    known_hash: str = ""


def scan(root: Path) -> ImageFolder:
    """List an image folder. Hidden files, and files without the suffix of an image, are ignored.

    Raises:
        UsageError: the folder is missing, unreadable or not laid out as above; it has fewer than two classes, a class
            without images, or a class that is not in all parts.
    """
    try:
        if not root.exists():
            raise UsageError(
                f"there is no folder '{root}': give a folder whose {SHAPE}, or a name from `hvdtrain data list`"
            )
        if not root.is_dir():
            raise UsageError(f"'{root}' is not a folder: give a folder whose {SHAPE}")
        for part in (TRAIN, VALIDATION):
            if not (root / part).is_dir():
                raise UsageError(f"'{root}' has no folder {part}: {SHAPE}")
        classes, in_validation = _class_names(root / TRAIN), _class_names(root / VALIDATION)
        if classes != in_validation:
            raise UsageError(
                f"the two parts of '{root}' have different classes: "
                + _difference(TRAIN, classes, in_validation)
                + _difference(VALIDATION, in_validation, classes)
                + "both need the same class folders"
            )
        if len(classes) == 1:
            raise UsageError(f"'{root}' has one class only, '{classes[0]}': there is nothing to tell apart")
        test: Samples = ()
        if (root / TEST).is_dir():
            if (in_test := _class_names(root / TEST)) != classes:
                raise UsageError(
                    f"{TEST} of '{root}' has other classes than {TRAIN}: {_difference(TEST, in_test, classes)}"
                )
            test = _samples(root / TEST, classes)
        return ImageFolder(root, classes, _samples(root / TRAIN, classes), _samples(root / VALIDATION, classes), test)
    except OSError as error:
        raise UsageError(f"cannot read '{error.filename or root}': {error.strerror}") from None


def content_hash(folder: ImageFolder) -> str:
    """`sha256:` and 64 hex digits: a hash of the path (relative to the root, with /) and the bytes of every image.

    It does not depend on where the folder is. UsageError where an image cannot be read.
    """
    if folder.known_hash:  # of shards: each image's own checksum is verified when it is read
        return folder.known_hash
    files = [path for path, _ in folder.train + folder.validation]
    batches = [files[start : start + 256] for start in range(0, len(files), 256)]
    total = hashlib.sha256()
    # Reading and hashing happen outside the interpreter lock, so a few threads help, on network disks most.
    with ThreadPoolExecutor(4) as pool:
        for batch, digests in zip(batches, pool.map(_digests, batches), strict=True):
            for path, digest in zip(batch, digests, strict=True):
                # No two lists of files give the same bytes: names have no zero byte, and digests a fixed length.
                total.update(os.fsencode(path.relative_to(folder.root).as_posix()) + b"\0" + digest)
    return f"sha256:{total.hexdigest()}"


def _digests(files: Sequence[Path]) -> list[bytes]:
    try:
        return [hashlib.sha256(path.read_bytes()).digest() for path in files]
    except OSError as error:
        raise UsageError(f"cannot read '{error.filename}': {error.strerror}") from None


def _class_names(part: Path) -> tuple[str, ...]:
    with os.scandir(part) as entries:
        names = tuple(sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir()))
    if not names:
        raise UsageError(f"'{part}' is empty: {SHAPE}")
    return names


def _samples(part: Path, classes: tuple[str, ...]) -> Samples:
    samples: list[tuple[Path, int]] = []
    for index, name in enumerate(classes):
        folder = part / name
        with os.scandir(folder) as entries:  # unlike iterdir, it needs no system call to tell a file from a folder
            images = sorted(
                e.name
                for e in entries
                if e.name.lower().endswith(SUFFIXES) and not e.name.startswith(".") and e.is_file()
            )
        if not images:
            raise UsageError(f"class '{name}' has no images in '{folder}': expected {', '.join(SUFFIXES)}")
        samples += [(folder / image, index) for image in images]
    return tuple(samples)


def _difference(part: str, here: Sequence[str], there: Sequence[str]) -> str:
    """`only in TrainData: a, b; ` or nothing, with at most five names."""
    names = [name for name in here if name not in there]
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"only in {part}: {listed}; " if names else ""
