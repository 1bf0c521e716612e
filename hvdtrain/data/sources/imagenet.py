"""ImageNet and its subsets, in the layouts in which they are distributed; a folder or an archive.

- ILSVRC2012's tars: see _ilsvrc_tars;
- Kaggle's ILSVRC tree: `train/<wnid>/`, a flat `val/` with `LOC_val_solution.csv`, and
  `LOC_synset_mapping.txt`;
- Tiny ImageNet: `train/<wnid>/images/`, and `val/images/` with `val_annotations.txt`;
- Kaggle's imagenet100: `train.X1/<wnid>/` … `train.X4/<wnid>/`, `val.X/<wnid>/`, and `Labels.json`;
- `train/<class>/` and `val/<class>/`, as an extracted ILSVRC2012 or Imagenette has them;
- any folder of class folders: see _class_folders.
"""

from collections.abc import Set
from functools import partial
from pathlib import Path

from msgspec import convert

from hvdtrain.base.config.untrusted import parse_json
from hvdtrain.base.errors import Failure
from hvdtrain.data.archive import Tree
from hvdtrain.data.download import fetch
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import choose_labels
from hvdtrain.data.sources import Source
from hvdtrain.data.sources._class_folders import in_class_folders
from hvdtrain.data.sources._ilsvrc_tars import TRAIN, open_tars


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    place = images_from or fetch(recipe)
    choose = partial(choose_labels, options=recipe.options)
    if place.name == TRAIN or (place / TRAIN).is_file():
        return open_tars(place if place.is_file() else place / TRAIN, choose)
    tree = Tree(place)
    items = in_class_folders(tree)
    titles = _titles(tree) if recipe.options.get("classes") else {}
    labels: Set[str] = {item.label for item in items}
    chosen = choose(labels, titles)
    items = [item for item in items if item.label in chosen]
    items.sort(key=lambda item: item.handle.offset)
    return Source(lambda: items, tree.fingerprint)


def _titles(tree: Tree) -> dict[str, str]:
    """Returns {wnid: names} of Kaggle's trees; empty for other trees.

    It is in `Labels.json`, or in the lines `wnid names` of `LOC_synset_mapping.txt`.
    """
    labels = tree.find("Labels.json")
    if labels:
        try:
            return convert(parse_json(labels.read_bytes()), dict[str, str])
        except ValueError as error:
            raise Failure(f"{labels.name} cannot be read as names of classes: {error}") from None
    titles = {}
    mapping = tree.find("LOC_synset_mapping.txt")
    if mapping:
        for line in mapping.read_bytes().decode(errors="replace").splitlines():
            label, _, names = line.partition(" ")
            titles[label] = names
    return titles
