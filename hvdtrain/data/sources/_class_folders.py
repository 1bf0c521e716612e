"""What sources of images in class folders share: an image's class is the folder of the first level that it lies in."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
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


def flat_names(images: Sequence[Found]) -> list[str]:
    """A file name for each: the folders below its class's are part of it, and no two in a class are the same, also
    where case does not count. Where they would be, or too long, a hash stands for the folders.
    """
    names = ["_".join([*one.below, PurePosixPath(one.member.name).name]) for one in images]
    keys = [(one.part, one.label, name.casefold()) for one, name in zip(images, names, strict=True)]
    times = Counter(keys)
    for number, (one, key) in enumerate(zip(images, keys, strict=True)):
        if times[key] > 1 or len(os.fsencode(names[number])) > MAX_NAME_BYTES:
            path = PurePosixPath(one.member.name)
            names[number] = f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}_{path.stem[:50]}{path.suffix}"
    return names
