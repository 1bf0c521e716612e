"""A user's own images: a folder for each class, or `train` and others with a folder for each class in them.

Nobody may have looked at them before: every image is decoded before anything is written, and what is left out is told.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hvdtrain.data import image
from hvdtrain.data.archive import Member, Tree, contents
from hvdtrain.data.folder import SUFFIXES
from hvdtrain.data.selection import Item, hold_out_copies_together
from hvdtrain.data.sources._class_folders import Found, flat_names, part_of
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import printable, some_of
from hvdtrain.progress_bars import count_bar

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe


class OwnImages:
    """The images of a folder. Its first level are the classes; what lies deeper belongs to them. Where there are
    folders for parts, `train` and at least one more, their first level are the classes.

    Attributes:
        notes: what is left out, and what equal images there are, a line each; whole once `items` was called.
    """

    titles: Mapping[str, str] = {}

    def __init__(self, tree: Tree, options: Mapping[str, Any]) -> None:
        self.identity, self.path, self.options = tree.fingerprint, tree.path, options
        images = [member for member in tree.members if member.name.lower().endswith(SUFFIXES)]
        folders = {member.name.split("/")[0] for member in images if "/" in member.name}
        parts = {part for name in folders if (part := part_of(name))}
        in_parts = "train" in parts and len(parts) > 1
        self.found, outside = [], []
        for member in images:
            *above, _ = member.name.split("/")
            part = part_of(above.pop(0)) if in_parts and above else ""
            if above and (part or not in_parts):
                self.found.append(Found(part, above[0], tuple(above[1:]), member))
            else:
                outside.append(member.name)
        self.labels = sorted({found.label for found in self.found if found.part != "test"})
        others = [member.name for member in tree.members if not member.name.lower().endswith(SUFFIXES)]
        kinds = Counter(PurePosixPath(name).suffix.lower() or "without a suffix" for name in others)
        self.notes = [f"left out: {count:,} file(s), {kind}" for kind, count in sorted(kinds.items())]
        self.notes += [f"left out: {count:,} {kind}" for kind, count in sorted(tree.passed_over.items())]
        if outside:
            self.notes.append(f"left out: {len(outside):,} image(s) in no class's folder: {some_of(outside)}")
        if empty := sorted(_class_folders(tree.path, in_parts) - {found.label for found in self.found}):
            self.notes.append(f"left out: {len(empty):,} folder(s) without an image: {some_of(empty)}")
        if only := sorted({found.label for found in self.found} - set(self.labels)):
            self.notes.append(f"left out: {len(only):,} class(es) with test images alone: {some_of(only)}")
        if not self.labels:
            raise UsageError(f"'{tree.path}' has no images in folders: it needs a folder for each class, with images "
                             f"({', '.join(SUFFIXES)}) in it")  # fmt: skip

    def items(self, labels: Sequence[str]) -> list[Item]:
        """The images that can be decoded. Of classes without validation images, those to hold out are drawn.

        Raises:
            Failure: images cannot be decoded, a line for each, and `skip_bad` is not given; or a class has fewer than
                two different ones.
        """
        wanted = set(labels)
        found = [one for one in self.found if one.label in wanted]
        looked = _look([one.member for one in found])
        bad = [problem for problem in looked if isinstance(problem, str)]
        if bad and not self.options["skip_bad"]:
            raise Failure(
                f"{len(bad):,} of the {len(found):,} images in '{self.path}' cannot be used, and nothing was written: "
                "mend them, remove them, or leave them out with --skip-bad", *bad,
            )  # fmt: skip
        self.notes += [f"left out: {problem}" for problem in bad]
        whole = [(one, digest) for one, digest in zip(found, looked, strict=True) if isinstance(digest, bytes)]
        if gone := sorted(wanted - {one.label for one, _ in whole}):
            self.notes.append(f"left out: {len(gone):,} class(es) of which no image can be used: {some_of(gone)}")
        self._tell_of_copies(whole)
        split = {one.label for one, _ in whole if one.part == "validation"}
        mine = [number for number, (one, _) in enumerate(whole) if one.part != "test" and one.label not in split]
        drawn = hold_out_copies_together(
            [(whole[number][0].label, whole[number][1]) for number in mine],
            self.options["validation"], self.options["seed"],
        )  # fmt: skip
        held = {mine[number] for number in drawn}
        return [
            Item(one.label, name, "validation" if number in held else one.part or "train", handle=one.member)
            for number, ((one, _), name) in enumerate(zip(whole, flat_names([one for one, _ in whole]), strict=True))
        ]

    contents = staticmethod(contents)

    def _tell_of_copies(self, whole: Sequence[tuple[Found, bytes]]) -> None:
        """Say which images have more than one class, or are in more than one of the user's own parts."""
        places: dict[bytes, list[Found]] = {}
        for one, digest in whole:
            places.setdefault(digest, []).append(one)
        copies = [own for own in places.values() if len(own) > 1]
        for what, differing in (
            ("in more than one class", [own for own in copies if len({one.label for one in own}) > 1]),
            ("in more than one part", [own for own in copies if len({one.part for one in own}) > 1]),
        ):  # fmt: skip
            if differing:
                names = some_of(" = ".join(one.member.name for one in own[:2]) for own in differing)
                self.notes.append(f"{len(differing):,} image(s) are {what}: {names}")


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> OwnImages:
    if not images_from or not images_from.is_dir():
        raise UsageError(
            f"'{recipe.name}' stands for images of your own: `hvdtrain data build {recipe.name} --source FOLDER --out "
            f"NEW` makes a data set of them, and --dataset NEW takes it (--dataset ./{recipe.name} is a folder here)"
        )
    return OwnImages(Tree(images_from), options)


def _class_folders(root: Path, in_parts: bool) -> set[str]:
    parents = [folder for folder in root.iterdir() if part_of(folder.name) and folder.is_dir()] if in_parts else [root]
    return {
        folder.name for parent in parents for folder in parent.iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
    }  # fmt: skip


def _look(members: Sequence[Member]) -> list[bytes | str]:
    """Of each image the SHA-256 of its file, or what is wrong with it."""

    def look(member: Member) -> bytes | str:
        try:
            content = member.read()
            image.decode(content, printable(member.name))
            return hashlib.sha256(content).digest()
        except Failure as problem:
            return str(problem)

    looked: list[bytes | str] = []
    with count_bar("looking") as progress, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for batch in (members[first : first + 1024] for first in range(0, len(members), 1024)):
            for found in pool.map(look, batch):
                looked.append(found)
                progress(len(looked), len(members))
    return looked
