"""Image folders: ROOT/TrainData/<class>/<image>, ROOT/ValidationData/<class>/<image>, and perhaps ROOT/TestData."""

import hashlib
import os
import shlex
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, overload

from msgspec import convert

from hvdtrain.config.untrusted import parse_toml
from hvdtrain.errors import UsageError
from hvdtrain.formatting import printable, some_of

TRAIN, VALIDATION, TEST = "TrainData", "ValidationData", "TestData"
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")  # in any case
SHAPE = f"images belong in {TRAIN}/<class>/ and {VALIDATION}/<class>/"
MANIFEST = "dataset.toml"
MAKER = "hvdtrain data build"  # stands in every manifest: only folders that have it are ever replaced

# (image, index of its class) each. An image is a Path, or has read_bytes and name as a Path does.
Samples = Sequence[tuple[Any, int]]


class ManyImages(Sequence[tuple[Any, int]]):
    """(image, index of its class) each: a million take little memory, for an image is made when it is asked for.

    Attributes:
        names: all file names, one after the other.
        ends: where in `names` each ends, [images] int64.
    """

    names: bytes | bytearray
    ends: array

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> tuple[Any, int]: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Any, int], ...]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        return self._image(range(len(self))[index])

    def _image(self, index: int) -> tuple[Any, int]:
        raise NotImplementedError

    def _name(self, index: int) -> bytes:
        return bytes(self.names[self.ends[index - 1] if index else 0 : self.ends[index]])


class Files(ManyImages):
    """The images of one part of a folder, by class and file name: (path, index of its class) each.

    Attributes:
        root: the data set's folder.
        part: TRAIN, VALIDATION or TEST.
        classes: names of the classes, as bytes.
        starts: which image is each class's first, [classes] int64.
        passed_over: what is not used in the class folders, hidden files aside: {"folder(s)": how many, ".tif": …}.
    """

    def __init__(self, root: Path, part: str, classes: Sequence[str]) -> None:
        self.root, self.part, self.classes = root, part, [os.fsencode(name) for name in classes]
        self.ends, self.starts = array("q"), array("q")
        self.passed_over: Counter[str] = Counter()
        suffixes = tuple(map(str.encode, SUFFIXES))
        joined, end = [], 0
        for name in classes:
            self.starts.append(len(self.ends))
            folder = os.fsencode(root / part / name)
            with os.scandir(folder) as entries:  # it needs no system call to tell a file from a folder
                files = []
                for entry in entries:
                    if entry.name.startswith(b"."):
                        continue
                    if entry.name.lower().endswith(suffixes) and entry.is_file():
                        files.append(entry.name)
                    else:
                        self.passed_over[_kind(entry)] += 1
            if not files:
                raise UsageError(
                    f"class '{name}' has no images in '{root / part / name}': expected {', '.join(SUFFIXES)}"
                )
            files.sort()
            for file in files:
                end += len(file)
                self.ends.append(end)
            joined.append(b"".join(files))
        self.names = b"".join(joined)

    def _image(self, index: int) -> tuple[Path, int]:
        label = bisect_right(self.starts, index) - 1
        path = os.path.join(os.fsencode(self.part), self.classes[label], self._name(index))
        return self.root / os.fsdecode(path), label

    def of_class(self, label: int) -> range:
        """The images of a class."""
        return range(self.starts[label], self.starts[label + 1] if label + 1 < len(self.starts) else len(self))

    def by_class(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Each class's folder, relative to the data set's, and the names in it."""
        for label, name in enumerate(self.classes):
            yield os.path.join(os.fsencode(self.part), name), [self._name(index) for index in self.of_class(label)]


@dataclass(frozen=True)
class ImageFolder:
    """What a folder holds: sorted class names, and the samples of each part, sorted by class and file name.

    Attributes:
        root: the folder, or the URL where its images are packed in shards.
        known_hash: what a run's manifest has as `dataset_hash`, where it is known; see data.identity.
        image_size: the side of the images to train on, in pixels, as `data build` has found it; 0 where it is unknown.
    """

    root: Any
    classes: tuple[str, ...]
    train: Samples
    validation: Samples
    test: Samples = ()
    known_hash: str = ""
    image_size: int = 0

    @property
    def images(self) -> Iterator[Any]:
        """The images for training and validation, in that order."""
        return (image for image, _ in chain(self.train, self.validation))

    @property
    def passed_over(self) -> str:
        """What is not used in the class folders, as their list shows it: `2 folder(s), 1 .tif`, or nothing."""
        files = [part for part in (self.train, self.validation, self.test) if isinstance(part, Files)]
        total = sum((part.passed_over for part in files), Counter[str]())
        return ", ".join(f"{count:,} {kind}" for kind, count in sorted(total.items()))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of `dataset.toml` in the folder; empty where this program did not write it."""
    try:
        manifest = parse_toml((folder / MANIFEST).read_text())
        convert(manifest.get("classes", {}), dict[str, dict[str, int]])
    except (OSError, ValueError):  # ValidationError is a ValueError
        return {}
    tables = all(isinstance(manifest.get(name, {}), dict) for name in ("input", "content", "options"))
    return manifest if manifest.get("made_by") == MAKER and tables else {}


def scan(root: Path) -> ImageFolder:
    """List an image folder. Folders in a class's, hidden files, and files without the suffix of an image are not used.

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
                raise UsageError(f"'{root}' has no folder {part}: {SHAPE}. {_how_to_split(root)}")
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
            test = Files(root, TEST, classes)
        return ImageFolder(
            root, classes, Files(root, TRAIN, classes), Files(root, VALIDATION, classes), test,
            image_size=usable_size(read_manifest(root).get("content", {}).get("image_size")),
        )  # fmt: skip
    except OSError as error:
        name = os.fsdecode(error.filename) if error.filename else root
        raise UsageError(f"cannot read '{name}': {error.strerror}") from None


def not_used(root: Path) -> list[str]:
    """What lies in an image folder's parts and is not used, hidden files aside: a line for each kind, with names.

    It walks through all folders: `scan` looks no deeper than those of the classes.
    """
    deeper: list[str] = []
    loose: list[str] = []
    others: list[str] = []
    seen: set[str] = set()  # a link may lead to a folder that it is in
    for part in (TRAIN, VALIDATION, TEST):
        for folder, folders, names in os.walk(root / part, followlinks=True):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if (real := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(real)
            depth = len(Path(folder).relative_to(root / part).parts)
            for name in sorted(names):
                path = os.path.join(folder, name)
                if name.startswith("."):
                    continue
                if not name.lower().endswith(SUFFIXES) or not os.path.isfile(path):
                    others.append(os.path.relpath(path, root))
                elif depth != 1:
                    (deeper if depth else loose).append(os.path.relpath(path, root))
    build = f"`hvdtrain data build folder --source {shlex.quote(str(root))} --out NEW` takes them"
    found = (
        (deeper, f"image(s) in folders below their class's ({build})"),
        (loose, "image(s) in no class's folder"),
        (others, f"file(s) that are not {', '.join(SUFFIXES)}"),
    )
    return [f"not used: {len(names):,} {what}: {some_of(names)}" for names, what in found if names]


def usable_size(written: Any) -> int:
    """The side of images that somebody has written down, in pixels; 0, unknown, where no model takes it."""
    return written if isinstance(written, int) and 32 <= written <= 4096 else 0


def content_hash(folder: ImageFolder) -> str:
    """`sha256:` and 64 hex digits: a hash of the path (relative to the root, with /) and the bytes of every image for
    training and validation. It reads them all.

    It does not depend on where the folder is. UsageError where an image cannot be read.
    """
    return combined_hash(folder, _all_digests(folder.images))


def combined_hash(folder: ImageFolder, digests: Iterable[bytes]) -> str:
    """The content_hash of a folder of which the SHA-256 of each image is known, in the order of `images`."""
    total = hashlib.sha256()
    for path, digest in zip(folder.images, digests, strict=True):
        # No two lists of files give the same bytes: names have no zero byte, and digests a fixed length.
        total.update(os.fsencode(path.relative_to(folder.root).as_posix()) + b"\0" + digest)
    return f"sha256:{total.hexdigest()}"


def _all_digests(images: Iterator[Path]) -> Iterator[bytes]:
    # Reading and hashing happen outside the interpreter lock, so a few threads help, on network disks most.
    with ThreadPoolExecutor(4) as pool:
        while batches := [batch for _ in range(16) if (batch := list(islice(images, 256)))]:
            for digests in pool.map(_digests, batches):
                yield from digests


def _digests(files: Sequence[Path]) -> list[bytes]:
    try:
        return [hashlib.sha256(path.read_bytes()).digest() for path in files]
    except OSError as error:
        raise UsageError(f"cannot read '{error.filename}': {error.strerror}") from None


def _class_names(part: Path) -> tuple[str, ...]:
    with os.scandir(part) as entries:
        names = tuple(sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir()))
    if not names:
        raise UsageError(f"'{part}' is empty: {SHAPE}. {_how_to_split(part.parent)}")
    return names


def _kind(entry: os.DirEntry[bytes]) -> str:
    """What this is that is no image."""
    if entry.is_dir():
        return "folder(s)"
    if not entry.is_file():
        return "link(s) that lead nowhere or devices"
    return printable(os.fsdecode(os.path.splitext(entry.name)[1].lower())) or "without a suffix"


def _how_to_split(root: Path) -> str:
    source = shlex.quote(str(root))
    return f"`hvdtrain data build folder --source {source} --out NEW` makes such a folder of one with a folder a class"


def _difference(part: str, here: Sequence[str], there: Sequence[str]) -> str:
    """`only in TrainData: a, b; ` or nothing, with at most five names."""
    names = [name for name in here if name not in there]
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"only in {part}: {listed}; " if names else ""
