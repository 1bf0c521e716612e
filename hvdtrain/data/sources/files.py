"""Images with their class in the file name, such as COIL-100's `obj7__355.png`.

The recipe's [files] has the pattern. Its group `label` is the class, its group `angle` the angle of
the view.
"""

import re
from pathlib import Path

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data.archive import Tree
from hvdtrain.data.download import fetch
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Item
from hvdtrain.data.sources import Source


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    tree = Tree(images_from or fetch(recipe))
    pattern = recipe.files["pattern"]
    count = recipe.files.get("count", 0)
    items = []
    for member in tree.members:
        name = member.name.rsplit("/", 1)[-1]
        if match := re.fullmatch(pattern, name):
            groups = match.groupdict()
            label = groups["label"]
            angle = int(groups.get("angle") or 0)
            items.append(Item(label, name, group=label, angle=angle, handle=member))
    if not items:
        raise UsageError(
            f"'{tree.path}' has no file with a name such as the recipe describes ({pattern})"
        )
    if count and len(items) != count:
        raise Failure(f"'{tree.path}' has {len(items):,} of the {count:,} images: is it whole?")
    return Source(lambda: items, tree.fingerprint)
