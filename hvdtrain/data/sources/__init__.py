"""Where images come from: a module a kind of source, named by a recipe's `source`.

Each has `open_source(recipe, options, place) -> Source`; `place` is the archive or folder that was given, or None.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.data.select import Item

if TYPE_CHECKING:
    from hvdtrain.data.archive import Member
    from hvdtrain.data.recipe import Recipe


class Source(Protocol):
    """What can be taken from.

    Attributes:
        labels: every class there is.
        titles: names for people, by label, where there are any.
        identity: text that differs where the images may; empty where the recipe says it all.
    """

    @property
    def labels(self) -> Sequence[str]: ...

    @property
    def titles(self) -> Mapping[str, str]: ...

    @property
    def identity(self) -> str: ...

    def items(self, labels: Sequence[str]) -> list[Item]:
        """Every image of these classes, in the order in which they are best read."""

    def contents(self, items: Sequence[Item]) -> Iterator["bytes | Member"]:
        """The encoded images of items, which are in the order that `items` gave them, or where to read them.

        Failure where one is broken.
        """


def open_source(recipe: "Recipe", options: Mapping[str, Any], place: Path | None) -> Source:
    """The source of a recipe. UsageError for options out of range, or where it needs a place and has none."""
    return importlib.import_module(f"hvdtrain.data.sources.{recipe.source}").open_source(recipe, options, place)
