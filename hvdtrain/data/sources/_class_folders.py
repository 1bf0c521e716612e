"""What sources of images in class folders share.

Below the folders that are alone on their level, the first level are the classes, or folders for parts with the classes
in them. What lies deeper than in a class's folder belongs to that class.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from hvdtrain.data.archive import Member, Tree
from hvdtrain.data.folder import PART_NAMES, SUFFIXES, TEST, TRAIN, VALIDATION
from hvdtrain.data.selection import Item
from hvdtrain.errors import UsageError

# The folders, in upper or lower case, that hold each part of the data set; with an x, of ImageNet-100 in pieces.
PART_FOLDERS = {
    "train": "|".join([*PART_NAMES[TRAIN], r"train\.x\d+"]),
    "validation": "|".join([*PART_NAMES[VALIDATION], r"val\.x"]),
    "test": "|".join(PART_NAMES[TEST]),
}
MAX_NAME_BYTES = 255  # of a file


def images_of(tree: Tree) -> list[Member]:
    return [member for member in tree.members if member.name.lower().endswith(SUFFIXES)]


def part_of(folder: str) -> str:
    """The part that a folder of this name holds; empty where it is none."""
    return next((part for part, names in PART_FOLDERS.items() if re.fullmatch(names, folder, re.IGNORECASE)), "")


def in_class_folders(tree: Tree) -> list[Item]:
    """The images that lie in a class's folder. There are parts where a folder called `train` and one more are.

    Raises:
        UsageError: there are none, or folders for validation and for test, and none called `train`.
    """
    images = images_of(tree)
    folders = [member.name.split("/")[:-1] for member in images]
    shared = 0
    while len({levels[shared] for levels in folders if len(levels) > shared}) == 1:
        shared += 1
    folders = [levels[shared:] for levels in folders]
    parts = {part for levels in folders if levels and (part := part_of(levels[0]))}
    in_parts = "train" in parts and len(parts) > 1
    if len(parts) > 1 and not in_parts:
        raise UsageError(f"'{tree.path}' has folders for validation and test, and none called train")
    items = []
    for member, levels in zip(images, folders, strict=True):
        part = part_of(levels[0]) if in_parts and levels else ""
        of_class = levels[1:] if in_parts else levels
        if of_class and (part or not in_parts):
            name = "_".join([*of_class[1:], PurePosixPath(member.name).name])
            items.append(Item(of_class[0], name, part, handle=member))
    # A folder of test images alone, such as that of ImageNet's unlabelled ones, is no class.
    labels = {item.label for item in items if item.part != "test"}
    if not labels:
        raise UsageError(
            f"'{tree.path}' has no images in class folders: it needs a folder for each class, with images "
            f"({', '.join(SUFFIXES)}) in it"
        )
    return _with_distinct_names([item for item in items if item.label in labels])


def _with_distinct_names(items: Sequence[Item]) -> list[Item]:
    """No two in a class have the same name, also where case does not count. Where they would, or one is too long, a
    hash stands for the folders.
    """
    times = Counter((item.part, item.label, item.name.casefold()) for item in items)
    renamed = []
    for item in items:
        if times[item.part, item.label, item.name.casefold()] > 1 or len(os.fsencode(item.name)) > MAX_NAME_BYTES:
            path = PurePosixPath(item.handle.name)
            digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
            item = replace(item, name=f"{digest}_{path.stem[:50]}{path.suffix}")
        renamed.append(item)
    return renamed
