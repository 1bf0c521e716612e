"""Where images come from: a module for each kind of source, named by a recipe's `source`.

Each has `open_source(recipe, options, images_from) -> Source`; `images_from` is the user's archive or folder, or None.
Modules whose names begin with _ are parts of others.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.data.selection import Item

if TYPE_CHECKING:
    from hvdtrain.data.archive import Member
    from hvdtrain.data.recipe import Recipe


class Source(Protocol):
    """The images of a source.

    Attributes:
        labels: of all classes.
        titles: names of classes for people, by label, where there are any.
        identity: text that changes when the images do; empty where the recipe determines them.
        notes: what the user should know of what was taken and left out, a line each, once `items` was called; a source
            that has nothing to say does without.
    """

    @property
    def labels(self) -> Sequence[str]: ...

    @property
    def titles(self) -> Mapping[str, str]: ...

    @property
    def identity(self) -> str: ...

    def items(self, labels: Sequence[str]) -> list[Item]:
        """Every image of these classes, in the order in which reading is fastest."""

    def contents(self, items: Sequence[Item]) -> Iterator["bytes | Member"]:
        """The encoded images of items, which are in the order of `items`, as bytes or as members to read.

        Failure where one is damaged.
        """


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> Source:
    """The source of a recipe. UsageError for options out of range, or if it needs `images_from` and has none."""
    return importlib.import_module(f"hvdtrain.data.sources.{recipe.source}").open_source(recipe, options, images_from)
