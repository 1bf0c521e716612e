"""Images whose file names contain their class, as COIL-100's `obj7__355.png`.

The recipe's [files] has the pattern: its group `label` is the class, `angle` that of the view.
"""

import re
from pathlib import Path

from hvdtrain.data.archive import Tree
from hvdtrain.data.download import fetch
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Item
from hvdtrain.data.sources import Source
from hvdtrain.errors import Failure, UsageError


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    tree = Tree(images_from or fetch(recipe))
    pattern, count = recipe.files["pattern"], recipe.files.get("count", 0)
    items = []
    for member in tree.members:
        name = member.name.rsplit("/", 1)[-1]
        if match := re.fullmatch(pattern, name):
            groups = match.groupdict()
            angle = int(groups.get("angle") or 0)
            items.append(Item(groups["label"], name, "", groups["label"], angle, member))
    if not items:
        raise UsageError(f"'{tree.path}' has no file with a name such as the recipe describes ({pattern})")
    if count and len(items) != count:
        raise Failure(f"'{tree.path}' has {len(items):,} of the {count:,} images: is it whole?")
    return Source(lambda: items, tree.fingerprint)
