"""Images in class folders, as several sources have them.

Folders that are alone on their level are skipped. The first level below them are the classes, or
the parts with classes in them. Images in deeper folders belong to the class above them.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data import image
from hvdtrain.data.archive import Member, Tree
from hvdtrain.data.folder import PART_NAMES, TEST, TRAIN, VALIDATION
from hvdtrain.data.names import USUAL_SUFFIXES, has_no_ending, is_image_name
from hvdtrain.data.selection import Item
from hvdtrain.data.sources._tables import TABLES, Labels, labels_of_validation

# Patterns of the names of each part's folders, in upper or lower case. Names with an x are those of
# ImageNet-100 in pieces.
PART_FOLDERS = {
    "train": "|".join([*PART_NAMES[TRAIN], r"train\.x\d+"]),
    "validation": "|".join([*PART_NAMES[VALIDATION], r"val\.x"]),
    "test": "|".join(PART_NAMES[TEST]),
}
MAX_NAME_BYTES = 255  # of a file


def images_of(tree: Tree) -> list[Member]:
    """Returns the members that are images by their names, or where these tell nothing, by content.

    In a compressed tar they are known by name alone, since it is read in order.
    """
    return [member for member in tree.members if _is_image(member)]


def _is_image(member: Member) -> bool:
    if is_image_name(member.name):
        return True
    if member.is_sequential or not has_no_ending(member.name):
        return False
    return image.is_image(member.read_start(image.START))


def part_of(folder: str) -> str:
    """Returns the part that a folder of this name holds; empty if it is none."""
    for part, names in PART_FOLDERS.items():
        if re.fullmatch(names, folder, re.IGNORECASE):
            return part
    return ""


def in_class_folders(tree: Tree) -> list[Item]:
    """Lists the images that lie in class folders, or whose classes a table tells (_tables).

    The data set has parts if there is a folder called `train` and another part's folder.

    Raises:
        UsageError: There are no such images, or folders for validation and test without `train`; or
            the validation images are in no class folders, and there is no table of their classes.
        Failure: A table cannot be read, has no class for some validation images, or a class that
            has no training images.
    """
    images = images_of(tree)
    folders = [member.name.split("/")[:-1] for member in images]
    shared = 0  # levels of folders that all images have in common
    while len({levels[shared] for levels in folders if len(levels) > shared}) == 1:
        shared += 1
    folders = [levels[shared:] for levels in folders]
    parts = {part_of(levels[0]) for levels in folders if levels} - {""}
    in_parts = "train" in parts and len(parts) > 1
    if len(parts) > 1 and not in_parts:
        raise UsageError(
            f"'{tree.path}' has folders for validation and test, and none called train"
        )
    table = labels_of_validation(tree, images)
    label_of = table.of
    flat = []  # validation images without a class
    items = []
    for member, levels in zip(images, folders, strict=True):
        if member.name in label_of:
            name = PurePosixPath(member.name).name
            items.append(Item(label_of[member.name], name, "validation", handle=member))
            continue
        part = part_of(levels[0]) if in_parts and levels else ""
        of_class = levels[1:] if in_parts else levels
        if of_class and (part or not in_parts):
            name = "_".join([*of_class[1:], PurePosixPath(member.name).name])
            items.append(Item(of_class[0], name, part, handle=member))
        elif part == "validation":
            flat.append(member)
    if in_parts:
        _check_validation(tree, table, items, flat)
    # A folder that has test images only is no class: ImageNet's unlabelled images lie in one.
    labels = {item.label for item in items if item.part != "test"}
    if not labels:
        raise UsageError(
            f"'{tree.path}' has no images in class folders: it needs a folder for each class, "
            f"with images ({', '.join(USUAL_SUFFIXES)}) in it"
        )
    return _with_distinct_names([item for item in items if item.label in labels])


def _check_validation(
    tree: Tree, table: Labels, items: Sequence[Item], flat: Sequence[Member]
) -> None:
    """Checks that the classes of validation images are known, and are classes of training images.

    Args:
        tree: The folder or archive.
        table: The classes that tables tell.
        items: The images that lie in class folders, or whose classes tables tell.
        flat: Validation images that are neither.

    Raises:
        UsageError: There is no table of classes, and no validation image is in the folder of one.
        Failure: A table lacks images, or has classes without training images.
    """
    classes = {item.label for item in items if item.part == "train"}
    validation = [item for item in items if item.part == "validation"]
    strangers = [item for item in validation if item.label not in classes]
    told = [item for item in strangers if item.handle.name in table.of]
    if told:
        first = told[0]
        raise Failure(
            f"{table.names[0]} has '{first.label}' as the class of {first.handle}, and there are no "
            f"training images of it: so of {len(told):,} of {len(validation):,} images. Give "
            "training images of such classes, or take these lines and images out"
        )
    untold = [*flat, *(item.handle for item in strangers)]
    if untold and table.names:
        raise Failure(
            f"{table.names[0]} has no class for {len(untold):,} of the "
            f"{len(validation) + len(flat):,} validation images, {untold[0]} first: complete it, "
            "or take these images out"
        )
    if untold and len(strangers) == len(validation):
        folder = PurePosixPath(untold[0].name).parent
        raise UsageError(
            f"the images in {folder}/ of '{tree.path}' are in no class folders, and there is no "
            f"{' or '.join(TABLES)} to say what they show"
        )


def _with_distinct_names(items: Sequence[Item]) -> list[Item]:
    """Renames items so that no two of a class have the same name, in upper or lower case.

    Where two would, or where a name is too long, a hash stands for the folders.
    """
    times = Counter((item.part, item.label, item.name.casefold()) for item in items)
    renamed = []
    for item in items:
        is_ambiguous = times[item.part, item.label, item.name.casefold()] > 1
        if is_ambiguous or len(os.fsencode(item.name)) > MAX_NAME_BYTES:
            path = PurePosixPath(item.handle.name)
            digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
            item = replace(item, name=f"{digest}_{path.stem[:50]}{path.suffix}")
        renamed.append(item)
    return renamed
