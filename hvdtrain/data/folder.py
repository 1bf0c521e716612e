"""Image folders: ROOT/train/<class>/<image>, ROOT/val/<class>/<image>, and perhaps ROOT/test; PART_NAMES has more."""

import hashlib
import os
import shlex
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import convert

from hvdtrain.config.untrusted import parse_toml
from hvdtrain.data import image
from hvdtrain.data.storage import on_all_cores
from hvdtrain.errors import UsageError
from hvdtrain.formatting import some_of

TRAIN, VALIDATION, TEST = "TrainData", "ValidationData", "TestData"  # as `data build` calls them
# Hugging Face's words for parts (datasets.data_files).
PART_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}  # fmt: skip
# What a part's folder may be called, in any case: as `data build` does, or as Hugging Face's imagefolder takes it.
PART_NAMES = {
    folder: (folder.lower(), *words)
    for folder, words in zip((TRAIN, VALIDATION, TEST), PART_WORDS.values(), strict=True)
}
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")  # in any case
SHAPE = f"images belong in train/<class>/ and val/<class>/, or {TRAIN}/ and {VALIDATION}/"
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # imagefolder's labels beside images
MANIFEST = "dataset.toml"
MAKER = "hvdtrain data build"  # stands in every manifest: only folders that have it are ever replaced

# (image, index of its class) each. An image is a Path, or has read_bytes and name as a Path does.
Samples = Sequence[tuple[Any, int]]


class ManyImages(Sequence[tuple[Any, int]]):
    """(image, index of its class) each: a million take little memory, for an image is made when it is asked for.

    Attributes:
        image: makes one, by its number from 0.
        labels: gives the class of each image, [images] int64.
        image_bytes: says how many bytes all images have, encoded.
    """

    image: Callable[[int], tuple[Any, int]]
    labels: Callable[[], Any]
    image_bytes: Callable[[], int]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        return self.image(range(len(self))[index])


class Files(ManyImages):
    """The images of one part of a folder, by class and file name: (path, index of its class) each.

    Attributes:
        names: all file names, one after the other.
        ends: where in `names` each ends, [images] int64.
        root: the data set's folder.
        part: the name of the part's folder.
        classes: names of the classes, as bytes.
        starts: which image is each class's first, [classes] int64.
        passed_over: what lies in the part or in a class's folder and is not used, hidden files aside: paths below root.

    Args:
        bad: images that are left out, as paths below root.
    """

    def __init__(self, root: Path, part: str, classes: Sequence[str], bad: Set[str] = frozenset()) -> None:
        self.root, self.part, self.classes = root, part, [os.fsencode(name) for name in classes]
        self.ends, self.starts = array("q"), array("q")
        with os.scandir(root / part) as entries:
            loose = [entry.name for entry in entries if os.path.isfile(entry.path)]
        self.passed_over = [f"{part}/{name}" for name in sorted(loose) if not name.startswith(".")]
        suffixes = tuple(map(str.encode, SUFFIXES))
        joined, end = [], 0
        for name in classes:
            self.starts.append(len(self.ends))
            folder = os.fsencode(root / part / name)
            with os.scandir(folder) as entries:
                files = []
                for entry in entries:
                    if entry.name.startswith(b"."):
                        continue
                    # Only a link takes a system call, and one that leads nowhere, or in a circle, is no file.
                    is_file = entry.is_file(follow_symlinks=False) or os.path.isfile(entry.path)
                    if is_file and entry.name.lower().endswith(suffixes):
                        files.append(entry.name)
                    else:
                        self.passed_over.append(os.path.relpath(os.fsdecode(entry.path), root))
            if bad:
                files = [file for file in files if f"{part}/{name}/{os.fsdecode(file)}" not in bad]
            if not files:
                raise _no_images(root / part / name)
            files.sort()
            for file in files:
                end += len(file)
                self.ends.append(end)
            joined.append(b"".join(files))
        self.names = b"".join(joined)

    def __len__(self) -> int:
        return len(self.ends)

    def image(self, index: int) -> tuple[Path, int]:
        label, start = bisect_right(self.starts, index) - 1, self.ends[index - 1] if index else 0
        path = os.path.join(os.fsencode(self.part), self.classes[label], self.names[start : self.ends[index]])
        return self.root / os.fsdecode(path), label

    def labels(self) -> Any:
        """The class of each image, [images] int64."""
        import numpy as np

        return np.repeat(np.arange(len(self.classes)), np.diff([*self.starts, len(self)]))

    def image_bytes(self) -> int:
        return sum(path.stat().st_size for path, _ in self)


@dataclass(frozen=True)
class ImageFolder:
    """What a folder holds: sorted class names, and the samples of each part, sorted by class and file name.

    Attributes:
        root: the folder, or as text that or the URL of Parquet files.
        known_hash: what a run's manifest has as `dataset_hash`, where it is known; see data.identity.
        image_size: the side of the images to train on, in pixels, where `data build` has written it down; else 0.
        bad: paths below root of damaged images, which --skip-bad has left out.
    """

    root: Any
    classes: tuple[str, ...]
    train: Samples
    validation: Samples
    test: Samples = ()
    known_hash: str = ""
    image_size: int = 0
    bad: tuple[str, ...] = ()

    @property
    def images(self) -> Iterator[Any]:
        """The images for training and validation, in that order."""
        return (sample for sample, _ in chain(self.train, self.validation))

    @property
    def passed_over(self) -> str:
        """What is not used in the folders of parts and classes: `3 file(s) or folder(s): …`, or nothing."""
        files = [part for part in (self.train, self.validation, self.test) if isinstance(part, Files)]
        names = sorted(chain.from_iterable(part.passed_over for part in files))
        return f"{len(names):,} file(s) or folder(s): {some_of(names)}" if names else ""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of `dataset.toml` in the folder; empty where this program did not write it."""
    try:
        manifest = parse_toml((folder / MANIFEST).read_text())
        convert(manifest.get("classes", {}), dict[str, dict[str, int]])
    except (OSError, ValueError):  # ValidationError is a ValueError
        return {}
    tables = all(isinstance(manifest.get(name, {}), dict) for name in ("input", "content", "options"))
    return manifest if manifest.get("made_by") == MAKER and tables else {}


def scan(root: Path, bad: Set[str] = frozenset()) -> ImageFolder:
    """List an image folder. Folders in a class's, hidden files, and files without the suffix of an image are not used.
    Where there is a test part and none for validation, the test images are what is validated on.

    Args:
        bad: images that are left out, as paths below root.

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
        parts = _part_folders(root)
        classes = _class_names(root / parts[0])
        for part in parts[1:]:
            if (names := _class_names(root / part)) != classes:
                raise UsageError(
                    f"{parts[0]} and {part} of '{root}' have different classes: {_only_in(parts[0], classes, names)}"
                    f"{_only_in(part, names, classes)}all need the same class folders"
                )  # fmt: skip
        if len(classes) == 1:
            raise UsageError(f"'{root}' has one class only, '{classes[0]}': there is nothing to tell apart")
        train, validation, *test = (Files(root, part, classes, bad) for part in parts)
        return ImageFolder(
            root, classes, train, validation, test[0] if test else (),
            image_size=usable_size(read_manifest(root).get("content", {}).get("image_size")), bad=tuple(sorted(bad)),
        )  # fmt: skip
    except OSError as error:
        name = os.fsdecode(error.filename) if error.filename else root
        raise UsageError(f"cannot read '{name}': {error.strerror}") from None


def _part_folders(root: Path) -> list[str]:
    """The folders to train with and to validate on, and one of test images, if there is one more with classes."""
    folders = _folders_in(root)
    unlabelled = [name for name in folders if name.lower() in PART_NAMES[TEST] and not _folders_in(root / name)]
    found = {}
    for part, names in PART_NAMES.items():
        own = [folder for folder in folders if folder.lower() in names and folder not in unlabelled]
        if len(own) > 1:
            raise UsageError(f"'{root}' has {' and '.join(own)}, which mean the same: leave one of them there")
        if own:
            found[part] = own[0]
    for part, name in ((TRAIN, "train"), (VALIDATION, "val")):
        if part not in found and not (part == VALIDATION and TEST in found):
            raise UsageError(f"'{root}' has no folder {name}: {SHAPE}. {_how_to_split(root)}")
    return list(found.values())


def has_classes(root: Path) -> bool:
    """Whether one of the folders that `scan` would read has folders in it."""
    names = {name for names in PART_NAMES.values() for name in names}
    return any(_folders_in(root / name) for name in _folders_in(root) if name.lower() in names)


def usable_size(written: Any) -> int:
    """The side of images that somebody has written down, in pixels; 0, unknown, where no model takes it."""
    return written if isinstance(written, int) and 32 <= written <= 4096 else 0


def content_hash(folder: ImageFolder) -> str:
    """`sha256:` and 64 hex digits: a hash of the path (relative to the root, with /) and the bytes of every image for
    training and validation. It reads them all.

    It does not depend on where the folder is. Failure where an image cannot be read.
    """
    digests = on_all_cores(lambda path: hashlib.sha256(image.read(path)).digest(), folder.images)
    return combined_hash(folder, (digest for _, digest in digests))


def combined_hash(folder: ImageFolder, digests: Iterable[bytes]) -> str:
    """The content_hash of a folder of which the SHA-256 of each image is known, in the order of `images`."""
    total = hashlib.sha256()
    for path, digest in zip(folder.images, digests, strict=True):
        # No two lists of files give the same bytes: names have no zero byte, and digests a fixed length.
        total.update(os.fsencode(path.relative_to(folder.root).as_posix()) + b"\0" + digest)
    return f"sha256:{total.hexdigest()}"


def _folders_in(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and os.path.isdir(entry.path))


def _class_names(part: Path) -> tuple[str, ...]:
    if names := _folders_in(part):
        return tuple(names)
    if labels := [name for name in METADATA if (part / name).is_file()]:
        raise UsageError(f"'{part / labels[0]}' is not read: {SHAPE}, where the folder's name is the label")
    raise UsageError(f"'{part}' has no class folders: {SHAPE}. {_how_to_split(part.parent)}")


def _no_images(folder: Path) -> UsageError:
    """The error for a class's folder that has none of its own."""
    if any(path.suffix.lower() in SUFFIXES for path in folder.glob("*/**/*")):
        return UsageError(
            f"class '{folder.name}' has images only in folders in '{folder}', which may be the classes: "
            "`hvdtrain data build folder --source … --out NEW` takes what lies deeper into the class"
        )
    return UsageError(f"class '{folder.name}' has no images in '{folder}': expected {', '.join(SUFFIXES)}")


def _how_to_split(root: Path) -> str:
    source = shlex.quote(str(root))
    return f"`hvdtrain data build folder --source {source} --out NEW` makes such a folder of one with a folder a class"


def _only_in(part: str, classes: Sequence[str], others: Sequence[str]) -> str:
    """`only in TrainData: a, b; ` or nothing."""
    names = [name for name in classes if name not in others]
    return f"only in {part}: {some_of(names)}; " if names else ""
