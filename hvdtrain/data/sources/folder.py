"""A user's images in class folders, in a folder or an archive; any may be damaged.

Every image is decoded before anything is written. Notes name the images that are left out.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.base.console import count_bar
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import some_of
from hvdtrain.data.archive import Member, Tree
from hvdtrain.data.image import digest_or_problem
from hvdtrain.data.names import counted_images_first, no_regular_files
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Item
from hvdtrain.data.sources import Source
from hvdtrain.data.sources._class_folders import in_class_folders
from hvdtrain.data.storage import on_all_cores


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    if not images_from:
        raise UsageError(
            f"'{recipe.name}' stands for your images: `hvdtrain data build {recipe.name} --source "
            f"FOLDER --out NEW` makes a data set of them, and --dataset NEW takes it (--dataset "
            f"./{recipe.name} is a folder here)"
        )
    tree = Tree(images_from)
    items = in_class_folders(tree)
    used = {item.handle.name for item in items}
    left_out = {member.name for member in tree.members} - used
    left_out.update(tree.passed_over)
    notes = []
    if left_out:
        notes.append(f"left out: {counted_images_first(left_out)}")
    if tree.irregular:
        notes.append(f"left out: {no_regular_files(tree.irregular)}")
    if tree.dos_names:
        notes.append(
            f"names in {images_from.name} are not UTF-8, and were read as those of DOS: "
            f"{some_of(tree.dos_names)}. If they read wrong, unpack it with the right encoding, as "
            "with `unzip -O cp932`, and give the folder"
        )
    skip_bad = recipe.options["skip_bad"]
    return Source(lambda: _whole_images(items, tree.path, skip_bad, notes), tree.fingerprint, notes)


@dataclass(frozen=True)
class InMemory:
    """An image that has been read from an archive in its order."""

    name: str
    content: bytes

    def read_bytes(self) -> bytes:
        return self.content

    def __str__(self) -> str:
        return self.name


def _readable(items: list[Item]) -> Iterator[tuple[Item, Member | InMemory]]:
    """Yields each item with what several threads may read at the same time."""
    for item in items:
        member = item.handle
        if member.is_sequential:
            yield item, InMemory(str(member), member.read_bytes())
        else:
            yield item, member


def _whole_images(items: list[Item], path: Path, skip_bad: bool, notes: list[str]) -> list[Item]:
    """Returns the images that can be decoded.

    Equal images of a class are a group. An image that several classes have is in no group, so that
    it is never held out.

    Args:
        items: The images.
        path: The folder or archive, for messages.
        skip_bad: Whether damaged images are left out.
        notes: Gets a line for each image and class that is left out.

    Raises:
        Failure: Images are damaged, and `skip_bad` is not given. There is a line for each image.
    """

    def look(original: tuple[Item, Member | InMemory]) -> bytes | str:
        return digest_or_problem(original[1])

    with count_bar("looking") as progress:
        looked_at = on_all_cores(look, _readable(items), len(items), progress)
        results = [(item, result) for (item, _), result in looked_at]
    bad = [result for _, result in results if isinstance(result, str)]
    if bad and not skip_bad:
        raise Failure(
            f"{len(bad):,} of the {len(items):,} images in '{path}' cannot be used, and nothing "
            "was written: mend them, remove them, or leave them out with --skip-bad",
            *bad,
        )
    notes += [f"left out: {problem}" for problem in bad]
    whole = [(item, digest.hex()) for item, digest in results if isinstance(digest, bytes)]
    classes_of: defaultdict[str, set[str]] = defaultdict(set)
    for item, digest in whole:
        classes_of[digest].add(item.label)
    left = {item.label for item, _ in whole}
    gone = sorted({item.label for item in items} - left)
    if gone:
        notes.append(
            f"left out: {len(gone):,} class(es) of which no image can be used: {some_of(gone)}"
        )
    grouped = []
    for item, digest in whole:
        group = digest if len(classes_of[digest]) == 1 else ""
        grouped.append(replace(item, group=group))
    return grouped
