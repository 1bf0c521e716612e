"""A user's own images: a folder for each class, or `train` and others with a folder for each class in them.

Nobody may have looked at them before: every image is decoded before anything is written, and what is left out is told.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.data import image
from hvdtrain.data.archive import Member, Tree
from hvdtrain.data.folder import SUFFIXES
from hvdtrain.data.selection import Item, hold_out_copies_together
from hvdtrain.data.sources import Source
from hvdtrain.data.sources._class_folders import Found, flat_names, part_of
from hvdtrain.data.storage import on_all_cores
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import printable, some_of
from hvdtrain.progress_bars import count_bar

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> Source:
    """The images of a folder. Its first level are the classes; what lies deeper belongs to them. Where it has folders
    for parts, `train` and at least one more, their first level are the classes.
    """
    if not images_from or not images_from.is_dir():
        raise UsageError(
            f"'{recipe.name}' stands for images of your own: `hvdtrain data build {recipe.name} --source FOLDER --out "
            f"NEW` makes a data set of them, and --dataset NEW takes it (--dataset ./{recipe.name} is a folder here)"
        )
    tree = Tree(images_from)
    found = _placed([member for member in tree.members if member.name.lower().endswith(SUFFIXES)])
    labels = {one.label for one in found if one.part != "test"}
    if not labels:
        raise UsageError(f"'{tree.path}' has no images in folders: it needs a folder for each class, with images "
                         f"({', '.join(SUFFIXES)}) in it")  # fmt: skip
    found = [one for one in found if one.label in labels]
    left_out = {member.name for member in tree.members} - {one.member.name for one in found} | set(tree.passed_over)
    notes = [f"left out: {len(left_out):,} file(s) and folder(s): {some_of(sorted(left_out))}"] if left_out else []
    return Source(lambda: _whole_images(found, tree.path, options, notes), tree.fingerprint, notes)


def _placed(images: Sequence[Member]) -> list[Found]:
    """The images that lie in a class's folder."""
    folders = {member.name.split("/")[0] for member in images if "/" in member.name}
    parts = {part for name in folders if (part := part_of(name))}
    in_parts = "train" in parts and len(parts) > 1
    found = []
    for member in images:
        *above, _ = member.name.split("/")
        part = part_of(above.pop(0)) if in_parts and above else ""
        if above and (part or not in_parts):
            found.append(Found(part, above[0], tuple(above[1:]), member))
    return found


def _whole_images(found: Sequence[Found], path: Path, options: Mapping[str, Any], notes: list[str]) -> list[Item]:
    """The images that can be decoded. Of classes without validation images, those to hold out are drawn.

    Args:
        notes: gets a line for each image and class that is left out.

    Raises:
        Failure: images cannot be decoded, a line for each, and `skip_bad` is not given; or a class has fewer than two
            different ones.
    """
    looked = _look([one.member for one in found])
    bad = [problem for problem in looked if isinstance(problem, str)]
    if bad and not options["skip_bad"]:
        raise Failure(
            f"{len(bad):,} of the {len(found):,} images in '{path}' cannot be used, and nothing was written: mend "
            "them, remove them, or leave them out with --skip-bad", *bad,
        )  # fmt: skip
    notes += [f"left out: {problem}" for problem in bad]
    whole = [(one, digest) for one, digest in zip(found, looked, strict=True) if isinstance(digest, bytes)]
    if gone := sorted({one.label for one in found} - {one.label for one, _ in whole}):
        notes.append(f"left out: {len(gone):,} class(es) of which no image can be used: {some_of(gone)}")
    split = {one.label for one, _ in whole if one.part == "validation"}
    to_split = [number for number, (one, _) in enumerate(whole) if one.part != "test" and one.label not in split]
    drawn = hold_out_copies_together(
        [(whole[number][0].label, whole[number][1]) for number in to_split], options["validation"], options["seed"]
    )
    held = {to_split[number] for number in drawn}
    names = flat_names([one for one, _ in whole])
    return [
        Item(one.label, name, "validation" if number in held else one.part or "train", handle=one.member)
        for number, ((one, _), name) in enumerate(zip(whole, names, strict=True))
    ]


def _look(members: Sequence[Member]) -> list[bytes | str]:
    """Of each image the SHA-256 of its file, or what is wrong with it."""

    def look(member: Member) -> bytes | str:
        try:
            content = member.read()
            image.decode(content, printable(member.name))
            return hashlib.sha256(content).digest()
        except Failure as problem:
            return str(problem)

    with count_bar("looking") as progress:
        return [result for _, result in on_all_cores(look, members, len(members), progress)]
