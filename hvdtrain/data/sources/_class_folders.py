"""What sources of images in class folders share: an image's class is the folder of the first level that it lies in."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from hvdtrain.data.archive import Member

# The folders, in upper or lower case, that hold each part of the data set.
PART_FOLDERS = {
    "train": r"train(\.x\d+)?|training|traindata",
    "validation": r"val(\.x)?|valid|validation|validationdata",
    "test": r"test|testdata",
}
MAX_NAME_BYTES = 255  # of a file


@dataclass(frozen=True)
class Found:
    """An image: `part` as in Item, its class, and the folders below its class's."""

    part: str
    label: str
    below: tuple[str, ...]
    member: Member


def part_of(folder: str) -> str:
    """The part that a folder of this name holds; empty where it is none."""
    return next((part for part, names in PART_FOLDERS.items() if re.fullmatch(names, folder, re.IGNORECASE)), "")


def flat_names(images: Iterable[Found]) -> list[str]:
    """A file name for each: the folders below its class's are part of it, and no two in a class are the same, also
    where case does not count.
    """
    taken: dict[tuple[str, str], set[str]] = {}
    names = []
    for one in images:
        path = PurePosixPath("_".join([*one.below, PurePosixPath(one.member.name).name]))
        stem, used = path.stem, taken.setdefault((one.part, one.label), set())
        while len(os.fsencode(stem + path.suffix)) > MAX_NAME_BYTES - 8:  # the number that may follow has room
            stem = stem[1:].lstrip(".")
        name, number = stem + path.suffix, 1
        while name.casefold() in used:
            number += 1
            name = f"{stem}-{number}{path.suffix}"
        used.add(name.casefold())
        names.append(name)
    return names
