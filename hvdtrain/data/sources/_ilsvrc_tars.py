"""The tars of ILSVRC2012, as they are distributed.

`ILSVRC2012_img_train.tar` is a tar of `<wnid>.tar`. In the same folder may be
`ILSVRC2012_img_val.tar`, with images that are in no folders, and the development kit, which has
their classes and the names of classes.
"""

import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data.archive import Member, Tree
from hvdtrain.data.names import is_image_name
from hvdtrain.data.selection import Item
from hvdtrain.data.sources import Source
from hvdtrain.data.sources._meta_mat import read_synsets

TRAIN = "ILSVRC2012_img_train.tar"
VALIDATION = "ILSVRC2012_img_val.tar"
KIT = "ILSVRC2012_devkit_t12.tar.gz"


def open_tars(train: Path, choose: Callable[[Set[str], Mapping[str, str]], Set[str]]) -> Source:
    """Opens the training tar, and the validation tar in the same folder.

    The tars of classes that are not chosen are not read.

    Args:
        train: The training tar.
        choose: Returns the wanted wnids from all wnids and {wnid: names, comma-separated}.

    Raises:
        UsageError: There are validation images, and no development kit.
        Failure: A file is not what its name says.
    """
    tree = Tree(train)
    tars = _tars_of_classes(tree)
    if not tars:
        raise Failure(
            f"'{train}' has no tars of classes such as n01440764.tar: is it the right file?"
        )
    identity = tree.fingerprint
    titles: dict[str, str] = {}
    label_of: dict[int, str] = {}
    validation: list[Item] = []
    validation_tar = train.with_name(VALIDATION)
    kit = train.with_name(KIT)
    if kit.is_file():
        kit_tree = Tree(kit)
        identity += kit_tree.fingerprint
        titles, label_of = _read_kit(kit_tree)
    elif validation_tar.is_file():
        raise UsageError(
            f"'{validation_tar}' needs {KIT} in the same folder, which says what its images show"
        )
    if validation_tar.is_file():
        validation_tree = Tree(validation_tar)
        identity += validation_tree.fingerprint
        validation = _validation_items(validation_tree, label_of)
    chosen = choose(tars.keys(), titles)

    def items() -> list[Item]:
        images = []
        for label in sorted(chosen, key=lambda label: tars[label].offset):
            for member in tree.members_of_tar(tars[label]):
                if is_image_name(member.name):
                    images.append(Item(label, Path(member.name).name, "train", handle=member))
        return images + [item for item in validation if item.label in chosen]

    return Source(items, identity)


def _tars_of_classes(tree: Tree) -> dict[str, Member]:
    """Returns the tar of each class, by wnid."""
    tars = {}
    for member in tree.members:
        if re.fullmatch(r"n\d{8}\.tar", member.name):
            tars[member.name.removesuffix(".tar")] = member
    return tars


def _validation_items(tree: Tree, label_of: Mapping[int, str]) -> list[Item]:
    """Lists the validation images. Raises Failure if the class of one is unknown."""
    items = []
    for member in tree.members:
        name = member.name.split("/")[-1]
        match = re.fullmatch(r"ILSVRC2012_val_(\d{8})\.JPEG", name)
        if not match:
            continue
        label = label_of.get(int(match[1]))
        if not label:
            raise Failure(f"'{tree.path}' has {name}, for which {KIT} has no class")
        items.append(Item(label, name, "validation", handle=member))
    return items


def _read_kit(tree: Tree) -> tuple[dict[str, str], dict[int, str]]:
    """Reads the development kit.

    The ground truth has ILSVRC's class numbers, 1 … 1000, in another order than that of wnids;
    meta.mat has the wnid of each number.

    Returns:
        {wnid: names}, and the wnid of each validation image by number, empty if it is unknown.

    Raises:
        Failure: The kit lacks a file, or one cannot be read.
    """
    meta = tree.find("meta.mat")
    truth = tree.find("ILSVRC2012_validation_ground_truth.txt")
    if not meta or not truth:
        raise Failure(
            f"'{tree.path}' holds no meta.mat, or no ground truth of the validation images"
        )
    try:
        synsets = read_synsets(meta.read_bytes())
        wnid_of = {number: wnid for number, wnid, _ in synsets}
        numbers = truth.read_bytes().decode().split()
        label_of = {image: wnid_of.get(int(number), "") for image, number in enumerate(numbers, 1)}
    except ValueError as error:
        raise Failure(f"'{tree.path}' cannot be read: {error}") from None
    return {wnid: names for _, wnid, names in synsets}, label_of
