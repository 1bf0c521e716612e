"""Images in class folders, in the layouts in which ImageNet and its subsets are distributed, as a folder or an archive.

- the tars of ILSVRC2012: `ILSVRC2012_img_train.tar` (a tar of `<wnid>.tar`) and, beside it, `ILSVRC2012_img_val.tar`
  with `ILSVRC2012_devkit_t12.tar.gz`; only wanted classes are read;
- Kaggle's ILSVRC tree: `train/<wnid>/`, a flat `val/` with `LOC_val_solution.csv`, `LOC_synset_mapping.txt`;
- Kaggle's imagenet100: `train.X1/<wnid>/` … `train.X4/<wnid>/`, `val.X/<wnid>/`, `Labels.json`;
- `train/<class>/` and `val/<class>/`, as an extracted ILSVRC2012 or Imagenette has them;
- any folder of class folders.

What lies deeper than in a class's folder belongs to that class.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.untrusted import parse_json
from hvdtrain.data.archive import Member, Tree, contents
from hvdtrain.data.download import fetch
from hvdtrain.data.folder import SUFFIXES
from hvdtrain.data.selection import Item
from hvdtrain.data.sources._class_folders import Found, flat_names, part_of
from hvdtrain.errors import Failure, UsageError

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe

TRAIN_TAR, VALIDATION_TAR, DEVKIT = (
    "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz",
)  # fmt: skip
_FLAT_VALIDATION = re.compile(r"(?:.*/)?val/[^/]+", re.IGNORECASE)


class ClassFolders:
    """Images whose class is a folder that they are in: in folders of parts the first level, else the first level at
    which there are several.
    """

    def __init__(self, tree: Tree) -> None:
        images = [member for member in tree.members if member.name.lower().endswith(SUFFIXES)]
        self.identity = tree.fingerprint
        self.titles = _titles(tree)
        found = _in_part_folders(images)
        solution = _find_member(tree, "LOC_val_solution.csv")
        placed = {one.member.name for one in found}
        flat = [m for m in images if m.name not in placed and _FLAT_VALIDATION.fullmatch(m.name)]
        if found and not any(one.part == "train" for one in found):
            raise UsageError(f"'{tree.path}' has folders for validation or test, and none called train")
        if found and flat and not solution and not any(one.part == "validation" for one in found):
            raise UsageError(
                f"the images in val/ of '{tree.path}' are in no class folders, and there is no LOC_val_solution.csv to "
                "say what they show"
            )
        if not found:
            found = _in_class_folders(images)
        elif solution:
            label_of = _kaggle_solution(solution)
            for member in flat:
                stem = Path(member.name).stem
                if stem in label_of:
                    found.append(Found("validation", label_of[stem], (), member))
        if not found:
            raise UsageError(f"'{tree.path}' has no images in class folders: see `hvdtrain data build --help`")
        self.found = sorted(found, key=lambda one: one.member.offset)
        # A folder of test images alone, such as that of ImageNet's unlabelled ones, is no class.
        self.labels = sorted({one.label for one in found if one.part != "test"})

    def items(self, labels: Sequence[str]) -> list[Item]:
        wanted = set(labels)
        found = [one for one in self.found if one.label in wanted]
        # Those that lie in their class's folder keep their names: an archive that has one twice is refused.
        deeper = iter(flat_names(one for one in found if one.below))
        return [
            Item(one.label, next(deeper) if one.below else Path(one.member.name).name, one.part, handle=one.member)
            for one in found
        ]

    contents = staticmethod(contents)


class ILSVRCTars:
    """The tars of ILSVRC2012, as they are distributed."""

    def __init__(self, train: Path) -> None:
        self.train = Tree(train)
        self.tars = {Path(m.name).stem: m for m in self.train.members if re.fullmatch(r"n\d{8}\.tar", m.name)}
        if not self.tars:
            raise Failure(f"'{train}' has no tars of classes such as n01440764.tar: is it the right file?")
        self.labels = sorted(self.tars)
        self.titles: dict[str, str] = {}
        self.validation: list[Item] = []
        self.identity = self.train.fingerprint
        file, devkit = train.with_name(VALIDATION_TAR), train.with_name(DEVKIT)
        truth: list[str] = []
        if file.is_file() or devkit.is_file():
            self.titles, truth = _devkit(devkit)
        if file.is_file():
            tree = Tree(file)
            for member in tree.members:
                name = member.name.rsplit("/", 1)[-1]
                if match := re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", name):
                    number = int(match[1])
                    if not 1 <= number <= len(truth):
                        raise Failure(f"'{file}' has {name}, for which '{DEVKIT}' has no class")
                    self.validation.append(Item(truth[number - 1], name, "validation", handle=member))
            self.identity += tree.fingerprint

    def items(self, labels: Sequence[str]) -> list[Item]:
        wanted = set(labels)
        train = [
            Item(label, Path(member.name).name, "train", handle=member)
            for label in sorted(labels, key=lambda label: self.tars[label].offset)
            for member in self.train.members_of_tar(self.tars[label])
            if member.name.lower().endswith(SUFFIXES)
        ]
        return train + [item for item in self.validation if item.label in wanted]

    contents = staticmethod(contents)


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> ClassFolders | ILSVRCTars:
    images_from = images_from or fetch(recipe)
    if images_from.is_dir() and (images_from / TRAIN_TAR).is_file():
        return ILSVRCTars(images_from / TRAIN_TAR)
    if images_from.name == TRAIN_TAR:
        return ILSVRCTars(images_from)
    return ClassFolders(Tree(images_from))


def _in_part_folders(images: Sequence[Member]) -> list[Found]:
    """Those in a class's folder in a folder for a part. What is above the first `train` is no part."""
    part = cache(part_of)
    placed = []  # each with the levels at which there may be a part: a class, and a file, are below it
    for member in images:
        *above, _ = member.name.split("/")
        if levels := [level for level, folder in enumerate(above[:-1]) if part(folder)]:
            placed.append((member, above, levels))
    top = min((level for _, above, levels in placed for level in levels if part(above[level]) == "train"), default=0)
    return [
        Found(part(above[level]), above[level + 1], tuple(above[level + 2 :]), member)
        for member, above, levels in placed
        if (level := next((level for level in levels if level >= top), -1)) >= 0
    ]


def _in_class_folders(images: Sequence[Member]) -> list[Found]:
    folders = [member.name.split("/")[:-1] for member in images]
    inside = [above for above in folders if above]
    first, last = min(inside, default=[]), max(inside, default=[])  # what these share, all do
    shared = next((level for level, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return [
        Found("", above[shared], tuple(above[shared + 1 :]), member)
        for member, above in zip(images, folders, strict=True)
        if len(above) > shared
    ]


def _find_member(tree: Tree, name: str) -> Member | None:
    return next((member for member in tree.members if member.name.split("/")[-1] == name), None)


def _titles(tree: Tree) -> dict[str, str]:
    """Names of the classes, from `Labels.json` ({wnid: names}) or `LOC_synset_mapping.txt` (`wnid names`)."""
    if labels := _find_member(tree, "Labels.json"):
        try:
            return {str(label): str(title) for label, title in parse_json(labels.read()).items()}
        except (ValueError, AttributeError) as error:
            raise Failure(f"{labels.name} cannot be read as names of classes: {error}") from None
    if mapping := _find_member(tree, "LOC_synset_mapping.txt"):
        lines = mapping.read().decode(errors="replace").splitlines()
        return {label: title for label, _, title in (line.partition(" ") for line in lines) if title}
    return {}


def _kaggle_solution(solution: Member) -> dict[str, str]:
    """{image: wnid} from `ImageId,PredictionString` lines, whose first word is the wnid."""
    try:
        rows = csv.DictReader(io.StringIO(solution.read().decode()))
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise Failure(f"{solution.name} cannot be read: {error!r}") from None


def _devkit(file: Path) -> tuple[dict[str, str], list[str]]:
    """({wnid: names}, the wnid of each validation image) from ILSVRC2012's development kit.

    The ground truth is in ILSVRC's own class numbers, 1 … 1000, whose order is not that of wnids: meta.mat translates.
    """
    from scipy.io import loadmat

    if not file.is_file():
        raise UsageError(f"{VALIDATION_TAR} needs '{file.name}' beside it, which says what its images show")
    tree = Tree(file)
    meta, truth = _find_member(tree, "meta.mat"), _find_member(tree, "ILSVRC2012_validation_ground_truth.txt")
    if not meta or not truth:
        raise Failure(f"'{file}' holds no meta.mat or no ground truth of the validation images")
    try:
        synsets = loadmat(io.BytesIO(meta.read()), squeeze_me=True)["synsets"]
        titles = {str(s["WNID"]): str(s["words"]) for s in synsets}
        wnid = {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in synsets}
        return titles, [wnid[int(line)] for line in truth.read().decode().split()]
    except Exception as error:  # scipy's reader raises many kinds
        raise Failure(f"'{file}' cannot be read: {error!r}") from None
