"""Images whose file names contain their class, as COIL-100's `obj7__355.png`: the recipe's [files] has the pattern."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.data.archive import Tree, contents
from hvdtrain.data.download import fetch
from hvdtrain.data.selection import Item
from hvdtrain.errors import Failure, UsageError

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe


class Files:
    """The files of a tree whose base names match the pattern: its group `label` is the class, `angle` that of the view.

    Args:
        count: how many images there should be; 0 where that is unknown.
    """

    titles: Mapping[str, str] = {}

    def __init__(self, tree: Tree, pattern: str, count: int) -> None:
        compiled = re.compile(pattern)
        self.all_items: list[Item] = []
        for member in tree.members:
            name = member.name.rsplit("/", 1)[-1]
            if match := compiled.fullmatch(name):
                groups = match.groupdict()
                angle = int(groups.get("angle") or 0)
                self.all_items.append(Item(groups["label"], name, "", groups["label"], angle, member))
        if not self.all_items:
            raise UsageError(f"'{tree.path}' has no file with a name such as the recipe describes ({pattern})")
        if count and len(self.all_items) != count:
            raise Failure(f"'{tree.path}' has {len(self.all_items):,} of the {count:,} images: is it whole?")
        self.labels = sorted({item.label for item in self.all_items})
        self.identity = tree.fingerprint

    def items(self, labels: Sequence[str]) -> list[Item]:
        wanted = set(labels)
        return [item for item in self.all_items if item.label in wanted]

    contents = staticmethod(contents)


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> Files:
    tree = Tree(images_from or fetch(recipe))
    return Files(tree, recipe.files["pattern"], recipe.files.get("count", 0))
