"""A user's images in class folders, of which nobody may have looked at any.

Every image is decoded before anything is written, and what is left out is told.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from hvdtrain.console import count_bar
from hvdtrain.data.archive import Tree
from hvdtrain.data.image import digest_or_problem
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Item
from hvdtrain.data.sources import Source
from hvdtrain.data.sources._class_folders import in_class_folders
from hvdtrain.data.storage import on_all_cores
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import some_of


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    if not images_from or not images_from.is_dir():
        raise UsageError(
            f"'{recipe.name}' stands for your images: `hvdtrain data build {recipe.name} --source FOLDER --out "
            f"NEW` makes a data set of them, and --dataset NEW takes it (--dataset ./{recipe.name} is a folder here)"
        )
    tree = Tree(images_from)
    items = in_class_folders(tree)
    left_out = {member.name for member in tree.members} - {item.handle.name for item in items} | set(tree.passed_over)
    notes = [f"left out: {len(left_out):,} file(s) and folder(s): {some_of(sorted(left_out))}"] if left_out else []
    return Source(lambda: _whole_images(items, tree.path, recipe.options["skip_bad"], notes), tree.fingerprint, notes)


def _whole_images(items: list[Item], path: Path, skip_bad: bool, notes: list[str]) -> list[Item]:
    """The images that can be decoded. Equal ones of a class are a group; those that several classes have are in none.

    Args:
        notes: gets a line for each image and class that is left out.

    Raises:
        Failure: images cannot be decoded, a line for each, and `skip_bad` is not given.
    """
    with count_bar("looking") as progress:
        results = list(on_all_cores(lambda item: digest_or_problem(item.handle), items, len(items), progress))
    bad = [result for _, result in results if isinstance(result, str)]
    if bad and not skip_bad:
        raise Failure(
            f"{len(bad):,} of the {len(items):,} images in '{path}' cannot be used, and nothing was written: mend "
            "them, remove them, or leave them out with --skip-bad", *bad,
        )  # fmt: skip
    notes += [f"left out: {problem}" for problem in bad]
    whole = [(item, digest.hex()) for item, digest in results if isinstance(digest, bytes)]
    classes_of: defaultdict[str, set[str]] = defaultdict(set)
    for item, digest in whole:
        classes_of[digest].add(item.label)
    if gone := sorted({item.label for item in items} - set[str]().union(*classes_of.values())):
        notes.append(f"left out: {len(gone):,} class(es) of which no image can be used: {some_of(gone)}")
    return [replace(item, group=digest if len(classes_of[digest]) == 1 else "") for item, digest in whole]
