"""Where images come from: a module for each kind of source, named by a recipe's `source`.

Each has `open_source(recipe, images_from) -> Source`; the recipe has the options of the request and its `seed`, and
`images_from` is the user's archive or folder, or None.
Modules whose names begin with _ are parts of others.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Item
from hvdtrain.errors import UsageError


@dataclass
class Source:
    """The images of a source.

    Attributes:
        items: lists them, in the order in which reading is fastest.
        identity: text that changes when the images do; empty where the recipe determines them.
        notes: what the user should know of what was taken and left out, a line each, once `items` was called.
    """

    items: Callable[[], list[Item]]
    identity: str = ""
    notes: list[str] = field(default_factory=list)


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    """The source of a recipe. UsageError for options out of range, or if it needs `images_from` and has none."""
    module = importlib.import_module(f"hvdtrain.data.sources.{recipe.source}")
    if images_from and getattr(module, "IS_GENERATED", False):
        raise UsageError(f"{recipe.name} takes no images from elsewhere: drop --archive or --source")
    return module.open_source(recipe, images_from)
