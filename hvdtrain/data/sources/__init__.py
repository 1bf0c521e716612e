"""Sources of images: a module for each kind, which a recipe's `source` names.

Each module has `open_source(recipe, images_from) -> Source`. The recipe has the options of the
request, with `seed`; `images_from` is the user's archive or folder, or None. Modules whose names
begin with _ are parts of other modules.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.base.errors import UsageError
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Item


@dataclass
class Source:
    """The images of a source.

    Attributes:
        items: Lists the images, in the order in which reading is fastest.
        identity: Text that changes when the images do; empty where the recipe determines them.
        notes: Lines for the user about images that are left out; complete once `items` was called.
    """

    items: Callable[[], list[Item]]
    identity: str = ""
    notes: list[str] = field(default_factory=list)


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    """Opens the source of a recipe.

    Args:
        recipe: The recipe, with the options of the request.
        images_from: The user's archive or folder; None to use the recipe's origin.

    Raises:
        UsageError: An option is out of range, or `images_from` is missing or not allowed.
    """
    module = importlib.import_module(f"hvdtrain.data.sources.{recipe.source}")
    if images_from and getattr(module, "IS_GENERATED", False):
        raise UsageError(
            f"{recipe.name} takes no images from elsewhere: drop --archive or --source"
        )
    return module.open_source(recipe, images_from)
