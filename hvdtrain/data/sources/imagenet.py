"""Images in class folders, in the layouts in which ImageNet and its subsets are distributed, as a folder or an archive.

- ILSVRC2012's tars: see _ilsvrc_tars;
- Kaggle's ILSVRC tree: `train/<wnid>/`, a flat `val/` with `LOC_val_solution.csv`, and `LOC_synset_mapping.txt`;
- Kaggle's imagenet100: `train.X1/<wnid>/` … `train.X4/<wnid>/`, `val.X/<wnid>/`, and `Labels.json`;
- `train/<class>/` and `val/<class>/`, as an extracted ILSVRC2012 or Imagenette has them;
- any folder of class folders: see _class_folders.
"""

import csv
import io
from collections.abc import Set
from functools import partial
from pathlib import Path, PurePosixPath

from msgspec import convert

from hvdtrain.config.untrusted import parse_json
from hvdtrain.data.archive import Tree
from hvdtrain.data.download import fetch
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Item, choose_labels
from hvdtrain.data.sources import Source
from hvdtrain.data.sources._class_folders import images_of, in_class_folders, part_of
from hvdtrain.data.sources._ilsvrc_tars import TRAIN, open_tars
from hvdtrain.errors import Failure, UsageError

SOLUTION = "LOC_val_solution.csv"


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    place = images_from or fetch(recipe)
    choose = partial(choose_labels, options=recipe.options)
    if place.name == TRAIN or (place / TRAIN).is_file():
        return open_tars(place if place.is_file() else place / TRAIN, choose)
    tree = Tree(place)
    items = in_class_folders(tree)
    items += _flat_validation(tree, items)
    chosen: Set[str] = choose({item.label for item in items}, _titles(tree) if recipe.options.get("classes") else {})
    items = sorted((item for item in items if item.label in chosen), key=lambda item: item.handle.offset)
    return Source(lambda: items, tree.fingerprint)


def _titles(tree: Tree) -> dict[str, str]:
    """{wnid: names} of Kaggle's trees, from `Labels.json` or the lines `wnid names` of `LOC_synset_mapping.txt`."""
    if labels := tree.find("Labels.json"):
        try:
            return convert(parse_json(labels.read_bytes()), dict[str, str])
        except ValueError as error:
            raise Failure(f"{labels.name} cannot be read as names of classes: {error}") from None
    mapping = tree.find("LOC_synset_mapping.txt")
    lines = mapping.read_bytes().decode(errors="replace").splitlines() if mapping else []
    return {label: names for label, _, names in (line.partition(" ") for line in lines)}


def _flat_validation(tree: Tree, items: list[Item]) -> list[Item]:
    """Images in Kaggle's flat `val/`, by its table: a line is `ImageId,PredictionString`, whose first word is the wnid.

    UsageError where there are such images, no others to validate on, and no table.
    """
    in_folders = {item.handle.name for item in items}
    flat = [
        member
        for member in images_of(tree)
        if part_of(PurePosixPath(member.name).parent.name) == "validation" and member.name not in in_folders
    ]
    solution = tree.find(SOLUTION)
    if not solution:
        if flat and not any(item.part == "validation" for item in items):
            raise UsageError(
                f"the images in val/ of '{tree.path}' are in no class folders, and there is no {SOLUTION} to say what "
                "they show"
            )
        return []
    try:
        rows = csv.DictReader(io.StringIO(solution.read_bytes().decode()))
        label_of = {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise Failure(f"{solution.name} cannot be read: {error!r}") from None
    return [
        Item(label_of[path.stem], path.name, "validation", handle=member)
        for member in flat
        if (path := PurePosixPath(member.name)).stem in label_of
    ]
