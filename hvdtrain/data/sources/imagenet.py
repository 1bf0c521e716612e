"""Images in class folders, in the layouts in which ImageNet and its subsets are distributed, as a folder or an archive.

- ILSVRC2012's tars: see _ilsvrc_tars;
- Kaggle's ILSVRC tree: `train/<wnid>/`, a flat `val/` with `LOC_val_solution.csv`, and `LOC_synset_mapping.txt`;
- Kaggle's imagenet100: `train.X1/<wnid>/` … `train.X4/<wnid>/`, `val.X/<wnid>/`, and `Labels.json`;
- `train/<class>/` and `val/<class>/`, as an extracted ILSVRC2012 or Imagenette has them;
- any folder of class folders.

What lies deeper than in a class's folder belongs to that class.
"""

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence, Set
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from msgspec import convert

from hvdtrain.config.untrusted import parse_json
from hvdtrain.data.archive import Member, Tree
from hvdtrain.data.download import fetch
from hvdtrain.data.folder import SUFFIXES
from hvdtrain.data.selection import Item, choose_labels
from hvdtrain.data.sources import Source
from hvdtrain.data.sources._class_folders import Found, flat_names, part_of
from hvdtrain.data.sources._ilsvrc_tars import TRAIN, ILSVRCTars
from hvdtrain.errors import Failure, UsageError

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe

SOLUTION = "LOC_val_solution.csv"
_FLAT_VALIDATION = re.compile(r"(?:.*/)?val/[^/]+", re.IGNORECASE)


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> Source:
    place = images_from or fetch(recipe)
    if place.name == TRAIN or (place / TRAIN).is_file():
        tars = ILSVRCTars(place if place.is_file() else place / TRAIN)
        return Source(lambda: tars.items(_chosen(tars.labels, tars.titles, options)), tars.identity)
    tree = Tree(place)
    images = [member for member in tree.members if member.name.lower().endswith(SUFFIXES)]
    found = _in_part_folders(images)
    if found:
        placed = {one.member.name for one in found}
        flat = [m for m in images if _FLAT_VALIDATION.fullmatch(m.name) and m.name not in placed]
        found += _flat_validation(tree, flat, {one.part for one in found})
    else:
        found = _in_class_folders(images)
    # A folder of test images alone, such as that of ImageNet's unlabelled ones, is no class.
    labels = {one.label for one in found if one.part != "test"}
    if not labels:
        raise UsageError(f"'{tree.path}' has no images in class folders: see `hvdtrain data build --help`")
    chosen = _chosen(labels, _titles(tree) if options.get("classes") else {}, options)
    found = sorted((one for one in found if one.label in chosen), key=lambda one: one.member.offset)
    # Those that lie in their class's folder keep their names: an archive that has one twice is refused.
    deeper = iter(flat_names([one for one in found if one.below]))
    items = [
        Item(one.label, next(deeper) if one.below else Path(one.member.name).name, one.part, handle=one.member)
        for one in found
    ]
    return Source(lambda: items, tree.fingerprint)


def _chosen(labels: Set[str], titles: Mapping[str, str], options: Mapping[str, Any]) -> Set[str]:
    wanted = [name.strip() for name in options.get("classes", "").split(",") if name.strip()]
    return choose_labels(labels, titles, wanted, options.get("num_classes", 0), options["seed"])


def _titles(tree: Tree) -> dict[str, str]:
    """{wnid: names} of Kaggle's trees, from `Labels.json` or the lines `wnid names` of `LOC_synset_mapping.txt`."""
    if labels := tree.find("Labels.json"):
        try:
            return convert(parse_json(labels.read()), dict[str, str])
        except ValueError as error:
            raise Failure(f"{labels.name} cannot be read as names of classes: {error}") from None
    mapping = tree.find("LOC_synset_mapping.txt")
    lines = mapping.read().decode(errors="replace").splitlines() if mapping else []
    return {label: names for label, _, names in (line.partition(" ") for line in lines)}


def _flat_validation(tree: Tree, flat: Sequence[Member], parts: set[str]) -> list[Found]:
    """Images in Kaggle's flat `val/`, by its table: a line is `ImageId,PredictionString`, whose first word is the wnid.

    Args:
        parts: those that have class folders. UsageError where they cannot be all that the tree has.
    """
    if "train" not in parts:
        raise UsageError(f"'{tree.path}' has folders for validation or test, and none called train")
    solution = tree.find(SOLUTION)
    if not solution:
        if flat and "validation" not in parts:
            raise UsageError(
                f"the images in val/ of '{tree.path}' are in no class folders, and there is no {SOLUTION} to say what "
                "they show"
            )
        return []
    try:
        rows = csv.DictReader(io.StringIO(solution.read().decode()))
        label_of = {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise Failure(f"{solution.name} cannot be read: {error!r}") from None
    return [
        Found("validation", label_of[stem], (), member)
        for member in flat
        if (stem := Path(member.name).stem) in label_of
    ]


def _in_part_folders(images: Sequence[Member]) -> list[Found]:
    """Those in a class's folder in a folder for a part. What is above the first `train` is no part."""
    part = cache(part_of)
    placed = []  # each with the levels at which there may be a part: a class, and a file, are below it
    for member in images:
        *above, _ = member.name.split("/")
        if levels := [level for level, folder in enumerate(above[:-1]) if part(folder)]:
            placed.append((member, above, levels))
    top = min((level for _, above, levels in placed for level in levels if part(above[level]) == "train"), default=0)
    return [
        Found(part(above[level]), above[level + 1], tuple(above[level + 2 :]), member)
        for member, above, levels in placed
        if (level := next((level for level in levels if level >= top), -1)) >= 0
    ]


def _in_class_folders(images: Sequence[Member]) -> list[Found]:
    folders = [member.name.rpartition("/")[0] for member in images]
    inside = [folder for folder in folders if folder]
    shared = len(PurePosixPath(os.path.commonpath(inside)).parts) if inside else 0
    return [
        Found("", above[shared], above[shared + 1 :], member)
        for member in images
        if len(above := PurePosixPath(member.name).parts[:-1]) > shared
    ]
