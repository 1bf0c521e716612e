"""The tars of ILSVRC2012, as they are distributed.

`ILSVRC2012_img_train.tar` is a tar of `<wnid>.tar`. In the same folder may be `ILSVRC2012_img_val.tar`, whose images
are in no folders, and the development kit, which says what they show and how the classes are called.
"""

import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from hvdtrain.data.archive import Tree
from hvdtrain.data.folder import SUFFIXES
from hvdtrain.data.selection import Item
from hvdtrain.data.sources import Source
from hvdtrain.data.sources._meta_mat import read_synsets
from hvdtrain.errors import Failure, UsageError

TRAIN, VALIDATION, KIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"


def open_tars(train: Path, choose: Callable[[Set[str], Mapping[str, str]], Set[str]]) -> Source:
    """The images of the training tar and of the validation tar that is with it. Of the tars of classes that are not
    chosen nothing is read.

    Args:
        choose: of all wnids and {wnid: names, comma-separated} those that are wanted.

    Raises:
        UsageError: there are validation images, and no development kit.
        Failure: a file is not what its name says.
    """
    tree = Tree(train)
    tars = {m.name[:-4]: m for m in tree.members if re.fullmatch(r"n\d{8}\.tar", m.name)}
    if not tars:
        raise Failure(f"'{train}' has no tars of classes such as n01440764.tar: is it the right file?")
    identity = tree.fingerprint
    titles: dict[str, str] = {}
    validation: list[Item] = []
    file, kit = train.with_name(VALIDATION), train.with_name(KIT)
    label_of: dict[int, str] = {}
    if kit.is_file():
        kit_tree = Tree(kit)
        identity += kit_tree.fingerprint
        titles, label_of = _read_kit(kit_tree)
    elif file.is_file():
        raise UsageError(f"'{file}' needs {KIT} in the same folder, which says what its images show")
    if file.is_file():
        validation_tree = Tree(file)
        identity += validation_tree.fingerprint
        validation = _validation_items(validation_tree, label_of)
    chosen = choose(tars.keys(), titles)

    def items() -> list[Item]:
        images = [
            Item(label, Path(member.name).name, "train", handle=member)
            for label in sorted(chosen, key=lambda label: tars[label].offset)
            for member in tree.members_of_tar(tars[label])
            if member.name.lower().endswith(SUFFIXES)
        ]
        return images + [item for item in validation if item.label in chosen]

    return Source(items, identity)


def _validation_items(tree: Tree, label_of: Mapping[int, str]) -> list[Item]:
    items = []
    for member in tree.members:
        name = member.name.split("/")[-1]
        if match := re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", name):
            if not (label := label_of.get(int(match[1]))):
                raise Failure(f"'{tree.path}' has {name}, for which {KIT} has no class")
            items.append(Item(label, name, "validation", handle=member))
    return items


def _read_kit(tree: Tree) -> tuple[dict[str, str], dict[int, str]]:
    """{wnid: names}, and the wnid of each validation image by its number; empty where its class is unknown.

    The ground truth is in ILSVRC's class numbers, 1 … 1000, whose order is not that of wnids: meta.mat translates.
    """
    meta, truth = tree.find("meta.mat"), tree.find("ILSVRC2012_validation_ground_truth.txt")
    if not meta or not truth:
        raise Failure(f"'{tree.path}' holds no meta.mat, or no ground truth of the validation images")
    try:
        synsets = read_synsets(meta.read_bytes())
        wnid_of = {number: wnid for number, wnid, _ in synsets}
        numbers = truth.read_bytes().decode().split()
        label_of = {image: wnid_of.get(int(number), "") for image, number in enumerate(numbers, 1)}
    except ValueError as error:
        raise Failure(f"'{tree.path}' cannot be read: {error}") from None
    return {wnid: names for _, wnid, names in synsets}, label_of
