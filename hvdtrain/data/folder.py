"""Image folders: ROOT/train/<class>/<image>, ROOT/val/<class>/<image>, and perhaps ROOT/test.

PART_NAMES has other names that the parts may have.
"""

import hashlib
import os
import shlex
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from msgspec import convert

from hvdtrain.base.config.untrusted import LARGEST_DOCUMENT, is_utf8, parse_toml, read_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import some_of
from hvdtrain.data import image
from hvdtrain.data.names import (
    SUFFIXES,
    USUAL_SUFFIXES,
    composed,
    counted_images_first,
    has_no_ending,
    is_image_name,
    is_passed_over,
    no_regular_files,
    not_utf8,
)
from hvdtrain.data.storage import on_all_cores

# The names that `data build` gives to parts.
TRAIN = "TrainData"
VALIDATION = "ValidationData"
TEST = "TestData"
# The words that Hugging Face has for parts (datasets.data_files).
PART_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# The names that a part's folder may have, in lower or upper case: those of `data build`, and those
# of Hugging Face's imagefolder.
PART_NAMES = {
    TRAIN: (TRAIN.lower(), *PART_WORDS["train"]),
    VALIDATION: (VALIDATION.lower(), *PART_WORDS["validation"]),
    TEST: (TEST.lower(), *PART_WORDS["test"]),
}
SHAPE = f"images belong in train/<class>/ and val/<class>/, or {TRAIN}/ and {VALIDATION}/"
# Files in which imagefolder finds labels.
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Files that have the labels of images beside them or below: Tiny ImageNet's, which only builds read.
ANNOTATIONS = "val_annotations.txt"
MANIFEST = "dataset.toml"
MOST_LOOKED_AT = 10_000  # files and folders, for a message
# Stands in every manifest. Only folders that have it are ever replaced.
MAKER = "hvdtrain data build"

# Pairs (image, index of its class). An image is a Path, or has read_bytes and name as a Path does.
Samples = Sequence[tuple[Any, int]]


class ManyImages(Sequence[tuple[Any, int]]):
    """Pairs (image, index of its class), made on demand: a million of them take little memory.

    Attributes:
        image: Returns the pair with an index from 0.
        labels: Returns the class of each image, [images] int64.
        image_bytes: Returns the bytes of all encoded images.
    """

    image: Callable[[int], tuple[Any, int]]
    labels: Callable[[], Any]
    image_bytes: Callable[[], int]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        return self.image(range(len(self))[index])


class Files(ManyImages):
    """Pairs (path, index of its class) of one part of a folder, sorted by class and file name.

    Args:
        root: The data set's folder.
        part: The name of the part's folder.
        folders: For each class the name of its folder in the part; empty where it has none.
        bad: Images that are left out, as paths below root.

    Attributes:
        folders: For each class the name of its folder, as bytes.
        names: All file names, concatenated.
        ends: The offset in `names` at which each file name ends, [images] int64.
        starts: The index of each class's first image, [classes] int64.
        empty: The indices of the classes that have no images.
        damaged: For each class, by its index, the number of images that are left out.
        passed_over: Paths below root of what lies in the folders of the part and of its classes and
            is not used.
        irregular: Paths below root, there too, of broken links, pipes and devices.
        left_by_systems: The number of hidden files and folders there, and of those that systems
            leave, by name.
    """

    def __init__(
        self, root: Path, part: str, folders: Sequence[str], bad: Set[str] = frozenset()
    ) -> None:
        self.root = root
        self.part = part
        self.folders = [os.fsencode(name) for name in folders]
        self.ends = array("q")
        self.starts = array("q")
        self.empty: list[int] = []
        self.damaged: Counter[int] = Counter()
        self.passed_over: list[str] = []
        self.irregular: list[str] = []
        self.left_by_systems: Counter[str] = Counter()
        with os.scandir(root / part) as entries:
            for entry in entries:
                if is_passed_over(entry.name):
                    self.left_by_systems[entry.name] += 1
                elif os.path.isfile(entry.path):
                    self.passed_over.append(f"{part}/{entry.name}")
                elif not os.path.isdir(entry.path):
                    self.irregular.append(f"{part}/{entry.name}")
        joined = []
        end = 0
        for number, name in enumerate(folders):
            self.starts.append(len(self.ends))
            files = self._images_of_class(name) if name else []
            if bad:
                found = len(files)
                files = [file for file in files if f"{part}/{name}/{os.fsdecode(file)}" not in bad]
                self.damaged[number] = found - len(files)
            if not files:
                self.empty.append(number)
            files.sort()
            for file in files:
                end += len(file)
                self.ends.append(end)
            joined.append(b"".join(files))
        self.names = b"".join(joined)

    def _images_of_class(self, folder: str) -> list[bytes]:
        """Returns the file names of a class's images; notes the other names."""
        suffixes = tuple(map(str.encode, SUFFIXES))
        files = []
        with os.scandir(os.fsencode(self.root / self.part / folder)) as entries:
            for entry in entries:
                name = entry.name
                # Only a link takes a system call. A link that leads nowhere, or in a circle, is no
                # file.
                is_file = entry.is_file(follow_symlinks=False) or os.path.isfile(entry.path)
                is_image = is_file and name.lower().endswith(suffixes)
                if is_image and not name.startswith(b"."):
                    files.append(name)
                elif self._is_image_without_ending(entry, is_file):
                    files.append(name)
        return files

    def _is_image_without_ending(self, entry: "os.DirEntry[bytes]", is_file: bool) -> bool:
        """Returns whether a file is an image by its first bytes; notes the name of what is none.

        Only files whose names tell no format are opened.
        """
        name = os.fsdecode(entry.name)
        if is_passed_over(name):
            self.left_by_systems[name] += 1
            return False
        path = os.fsdecode(entry.path)
        if is_file and has_no_ending(name) and image.is_image_file(path):
            return True
        unused = self.passed_over if is_file or os.path.isdir(path) else self.irregular
        unused.append(os.path.relpath(path, self.root))
        return False

    def __len__(self) -> int:
        return len(self.ends)

    def image(self, index: int) -> tuple[Path, int]:
        label = bisect_right(self.starts, index) - 1
        start = self.ends[index - 1] if index else 0
        file = self.names[start : self.ends[index]]
        path = os.path.join(os.fsencode(self.part), self.folders[label], file)
        return self.root / os.fsdecode(path), label

    def paths(self) -> Iterator[bytes]:
        """Yields the path of each image, in order, in less time than `image` takes."""
        start = 0
        bounds = [*self.starts, len(self)]
        for label, folder in enumerate(self.folders):
            place = os.path.join(os.fsencode(self.root), os.fsencode(self.part), folder, b"")
            first, until = bounds[label : label + 2]
            for end in self.ends[first:until]:
                yield place + self.names[start:end]
                start = end

    def labels(self) -> Any:
        """Returns the class of each image, [images] int64."""
        import numpy as np

        return np.repeat(np.arange(len(self.folders)), np.diff([*self.starts, len(self)]))

    def image_bytes(self) -> int:
        """Returns the bytes of all image files."""
        return sum(path.stat().st_size for path, _ in self)


@dataclass(frozen=True)
class ImageFolder:
    """A data set of images: the names of its classes, sorted, and the samples of each part.

    Attributes:
        root: The folder; the URL of Parquet files, or the name of other data, as text.
        classes: The names of the classes.
        train: The samples to train on, sorted by class and file name.
        validation: The samples to validate on, in the same order.
        test: The samples to test on, in the same order; may be empty.
        known_hash: The `dataset_hash` of a manifest where it is known already; see data.identity.
        image_size: The side of training images in pixels where `data build` has written it down;
            else 0.
        bad: Paths below root of damaged images, which --skip-bad has left out.
        notes: What a user should know of the data set, a line each.
    """

    root: Any
    classes: tuple[str, ...]
    train: Samples
    validation: Samples
    test: Samples = ()
    known_hash: str = ""
    image_size: int = 0
    bad: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def images(self) -> Iterator[Any]:
        """The images for training and validation, in that order."""
        return (sample for sample, _ in chain(self.train, self.validation))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the content of `dataset.toml` in a folder; empty if `data build` did not write it."""
    try:
        manifest = parse_toml(read_whole(folder / MANIFEST, LARGEST_DOCUMENT).decode())
        convert(manifest.get("classes", {}), dict[str, dict[str, int]])
    except (OSError, ValueError):  # ValidationError is a ValueError
        return {}
    if manifest.get("made_by") != MAKER:
        return {}
    tables = [manifest.get(name, {}) for name in ("input", "content", "options")]
    return manifest if all(isinstance(table, dict) for table in tables) else {}


def scan(root: Path, bad: Set[str] = frozenset()) -> ImageFolder:
    """Lists an image folder.

    Folders in a class's folder, hidden files, and files that are no images are not used. If there
    is a test part and no validation part, the test images are the validation part. A test part with
    other classes than the training part is left out.

    Args:
        root: The folder.
        bad: Images that are left out, as paths below root.

    Raises:
        UsageError: The folder is missing, cannot be read, or is laid out in another way; it has
            fewer than two classes, a class without training images, a validation part without
            images, or one with classes that the training part lacks.
    """
    try:
        _check_is_folder(root)
        train_name, validation_name, test_name = _part_folders(root)
        classes = _class_names(root / train_name)
        if len(classes) == 1:
            raise UsageError(
                f"'{root}' has one class only, '{classes[0]}': there is nothing to tell apart"
            )
        train = Files(root, train_name, classes, bad)
        if train.empty:
            number = train.empty[0]
            raise _no_images(root / train_name / classes[number], train.damaged[number])
        folders, others = _folders_of_classes(root / validation_name, classes)
        if others:
            raise _other_classes(root, train_name, validation_name, classes, others)
        validation = Files(root, validation_name, folders, bad)
        if not validation:
            number = next(number for number, name in enumerate(folders) if name)
            folder = root / validation_name / folders[number]
            raise _no_images(folder, validation.damaged[number])
        notes = [not_utf8(name) for name in classes if not is_utf8(name)]
        notes += _alike(classes)
        notes += _lacking(validation, classes)
        if validation_name.lower() in PART_NAMES[TEST]:
            notes.append(stands_in(validation_name))
        test: Samples = ()
        parts = [train, validation]
        if test_name:
            folders, problem = _test_folders(root / test_name, classes)
            if problem:
                notes.append(f"the images in {test_name} are left out: {problem}")
            else:
                test = Files(root, test_name, folders, bad)
                parts.append(test)
        content = read_manifest(root).get("content", {})
        return ImageFolder(
            root,
            classes,
            train,
            validation,
            test,
            image_size=usable_size(content.get("image_size")),
            bad=tuple(sorted(bad)),
            notes=(*notes, *_unused(root, parts)),
        )
    except OSError as error:
        name = os.fsdecode(error.filename) if error.filename else root
        raise UsageError(f"cannot read '{name}': {error.strerror}") from None


def _check_is_folder(root: Path) -> None:
    """Raises UsageError unless there is a folder."""
    if not root.exists():
        raise UsageError(
            f"there is no folder '{root}': give a folder whose {SHAPE}, or a name from "
            "`hvdtrain data list`"
        )
    if not root.is_dir():
        raise UsageError(
            f"'{root}' is not a folder: give a folder whose {SHAPE}. {_how_to_split(root)}, also "
            "of a zip or tar"
        )


def _folders_of_classes(part: Path, classes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Finds the folders of classes in a part.

    A folder's name may have accents in another form than the class has (names.composed).

    Returns:
        For each class the name of its folder, empty where it has none; and the folders of no class.
    """
    names = _class_names(part)
    in_form = {composed(name): name for name in names}
    folders = [name if name in names else in_form.get(composed(name), "") for name in classes]
    others = [name for name in names if name not in folders]
    return folders, others


def _test_folders(part: Path, classes: Sequence[str]) -> tuple[list[str], str]:
    """Returns the folder of each class in the test part, and why the part cannot be used, if so."""
    if not _folders_in(part):
        return [], "they are in no class folders"
    folders, others = _folders_of_classes(part, classes)
    problem = ""
    if others:
        problem = f"some are in folders of no class of the training part ({some_of(others)})"
    return folders, problem


def _alike(classes: Sequence[str]) -> Iterator[str]:
    """Yields a line for each name that several classes have, with accents in several forms."""
    for name, times in Counter(map(composed, classes)).items():
        if times > 1:
            yield (
                f"{times} classes are called '{name}', with their accents written in several ways: "
                "put them into one folder if they are one class"
            )


def _lacking(validation: Files, classes: Sequence[str]) -> list[str]:
    """Returns lines about the classes that have no validation images."""
    lines = lacking_by_labels(validation.part, validation.labels(), classes)
    for number in validation.empty:
        if validation.damaged[number]:
            lines.append(_all_damaged(validation.part, classes[number], validation.damaged[number]))
    return lines


def lacking_by_labels(
    part: str,
    labels: Any,
    classes: Sequence[str],
    noun: str = "images",
    so: str = "accuracy is that of the others",
) -> list[str]:
    """Returns a line about the classes of which a part has nothing; none if it has some of each.

    Args:
        part: The name of the part.
        labels: The class of each sample, [samples] integers.
        classes: The names of all classes.
        noun: What a class has.
        so: What follows.
    """
    import numpy as np

    there = set(np.unique(labels).tolist())
    names = [name for number, name in enumerate(classes) if number not in there]
    if not names:
        return []
    of_classes = f"{len(names):,} of the {len(classes):,} classes: {some_of(names)}"
    return [f"{part} has no {noun} of {of_classes}; {so}"]


def stands_in(name: str) -> str:
    """Returns a line about a test part that is validated on, since there is no other."""
    return (
        f"there is no validation part: {name} stands for it, so that nothing is left that "
        "training has not looked at"
    )


def _all_damaged(part: str, name: str, images: int) -> str:
    images_of = f"all {images:,} images" if images > 1 else "the only image"
    return f"{images_of} of class '{name}' in {part} {'are' if images > 1 else 'is'} damaged"


def _unused(root: Path, parts: Sequence[Files]) -> Iterator[str]:
    """Yields lines about the files and folders of these parts that are not used."""
    unused: list[str] = []
    irregular: list[str] = []
    left_by_systems: Counter[str] = Counter()
    for part in parts:
        unused += part.passed_over
        irregular += part.irregular
        left_by_systems += part.left_by_systems
    if unused:
        yield (
            f"not used: {counted_images_first(unused)} ({_build_from(root)} takes images in deeper "
            "folders)"
        )
    if irregular:
        yield f"not used: {no_regular_files(irregular)}"
    if left_by_systems:
        yield (
            f"passed over: {left_by_systems.total():,} hidden file(s) and folder(s), or left by "
            f"systems: {some_of(sorted(left_by_systems))}"
        )


def _part_folders(root: Path) -> tuple[str, str, str]:
    """Returns the names of three folders: training, validation and test.

    The test part has no name where there is none, or where it stands for validation. One without
    class folders does not.

    Raises:
        UsageError: Training or validation images are missing, or two folders are the same part.
    """
    folders = _folders_in(root)
    tests = [name for name in folders if name.lower() in PART_NAMES[TEST]]
    unlabelled = [name for name in tests if not _folders_in(root / name)]
    usable = [name for name in folders if name not in unlabelled]
    found = {}
    for part, names in PART_NAMES.items():
        matching = [name for name in usable if name.lower() in names]
        if len(matching) > 1:
            raise UsageError(
                f"'{root}' has {' and '.join(matching)}, which mean the same: "
                "leave one of them there"
            )
        if matching:
            found[part] = matching[0]
    missing = ""
    if TRAIN not in found:
        missing = "train"
    elif VALIDATION not in found and TEST not in found:
        missing = "val"
    if missing:
        raise UsageError(
            f"'{root}' has no folder {missing}: {SHAPE}. {_near(root, folders)}"
            f"{_how_to_split(root)}"
        )
    if VALIDATION not in found:
        return found[TRAIN], found[TEST], ""
    test = found.get(TEST) or next(iter(unlabelled), "")
    return found[TRAIN], found[VALIDATION], test


def _near(root: Path, folders: Sequence[str]) -> str:
    """Returns a sentence that names the folder near this one that has a training part, if any has."""
    part_names = set(chain.from_iterable(PART_NAMES.values()))
    if root.name.lower() in part_names:
        return f"'{root}' is a part by its name: give '{root.parent}'. "
    for name in folders:
        if any(part.lower() in PART_NAMES[TRAIN] for part in _folders_in(root / name)):
            return f"'{root / name}' has a training part: give that folder. "
    near = islice(root.rglob("*"), MOST_LOOKED_AT)
    for path in near:
        if path.suffix == ".parquet":
            return f"'{path}' lies deeper than Parquet files are looked for: give its folder. "
    return ""


def has_classes(root: Path) -> bool:
    """Returns whether a folder that `scan` takes for a part has folders in it."""
    part_names = set(chain.from_iterable(PART_NAMES.values()))
    parts = [name for name in _folders_in(root) if name.lower() in part_names]
    return any(_folders_in(root / part) for part in parts)


def usable_size(written: Any) -> int:
    """Returns the side of images that a file names, in pixels; 0 if models do not take it."""
    return written if isinstance(written, int) and 32 <= written <= 4096 else 0


def content_hash(folder: ImageFolder) -> str:
    """Reads all images for training and validation, and returns a hash of their paths and bytes.

    Paths are relative to the root, so that the hash does not depend on where the folder is.

    Returns:
        `sha256:` and 64 hex digits.

    Raises:
        Failure: An image cannot be read.
    """
    digests = on_all_cores(lambda path: hashlib.sha256(image.read(path)).digest(), folder.images)
    return combined_hash(folder, (digest for _, digest in digests))


def combined_hash(folder: ImageFolder, digests: Iterable[bytes]) -> str:
    """Returns the content_hash of a folder from the SHA-256 of each image.

    Args:
        folder: The folder.
        digests: A digest of 32 bytes for each of `folder.images`, in order.
    """
    total = hashlib.sha256()
    for path, digest in zip(folder.images, digests, strict=True):
        # Two different lists of files never give the same bytes: names have no zero byte, and
        # digests have a fixed length.
        total.update(os.fsencode(path.relative_to(folder.root).as_posix()) + b"\0" + digest)
    return f"sha256:{total.hexdigest()}"


def _folders_in(folder: Path) -> list[str]:
    """Returns the names of the folders in a folder, sorted, without names.is_passed_over."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not is_passed_over(entry.name) and os.path.isdir(entry.path)
        )


def _class_names(part: Path) -> tuple[str, ...]:
    """Returns the names of the classes in a part's folder. Raises UsageError if there are none."""
    names = _folders_in(part)
    if names:
        return tuple(names)
    for name in METADATA:
        if (part / name).is_file():
            raise UsageError(
                f"'{part / name}' is not read: {SHAPE}, where the folder's name is the label"
            )
    raise UsageError(f"'{part}' has no class folders: {SHAPE}. {_how_to_split(part.parent)}")


def _no_images(folder: Path, damaged: int) -> UsageError:
    """Returns the error for a class's folder that has no images, without the damaged ones."""
    if damaged:
        return UsageError(
            f"{_all_damaged(str(folder.parent), folder.name, damaged)}, and --skip-bad leaves none: "
            "mend or replace them, or remove the folder"
        )
    if any(is_image_name(path.name) for path in folder.glob("*/**/*")):
        return UsageError(
            f"class '{folder.name}' has images only in folders in '{folder}', which may be the "
            f"classes: {_build_from(folder.parent.parent)} takes what lies deeper into the class"
        )
    return UsageError(
        f"class '{folder.name}' has no images in '{folder}': expected "
        f"{', '.join(USUAL_SUFFIXES)} or the like. Remove the folder if it is no class"
    )


def _build_from(root: Path) -> str:
    return f"`hvdtrain data build folder --source {shlex.quote(str(root))} --out NEW`"


def _how_to_split(root: Path) -> str:
    return f"{_build_from(root)} makes such a folder of one with a folder a class"


def _other_classes(
    root: Path, train: str, validation: str, classes: Sequence[str], others: Sequence[str]
) -> UsageError:
    """Returns the error for validation folders that are no class of the training part."""
    if (root / validation / ANNOTATIONS).is_file():
        return UsageError(
            f"the images in '{root / validation}' have their classes in {ANNOTATIONS}: "
            f"{_how_to_split(root)}, and reads that file"
        )
    if others == ["images"] and "images" not in classes:
        return UsageError(
            f"the images in '{root / validation / 'images'}' are in no class folders, and "
            f"{ANNOTATIONS}, which tells their classes in Tiny ImageNet, is not in {validation}: "
            "copy it there"
        )
    by_case = {name.lower(): name for name in classes}
    alike = [(name, by_case[name.lower()]) for name in others if name.lower() in by_case]
    hint = ""
    if alike:
        hint = f" ('{alike[0][0]}' is '{alike[0][1]}' there)"
    return UsageError(
        f"{validation} of '{root}' has classes that {train} has not: {some_of(others)}{hint}. Give "
        f"{train} images of them, or take these folders out of {validation}"
    )
