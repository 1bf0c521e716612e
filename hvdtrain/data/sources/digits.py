"""Real handwritten digits that need no download: scikit-learn includes them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.data.image import png
from hvdtrain.data.selection import Item
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe

SIDE = 32  # pixels; the smallest image that a VGG can halve five times


class Digits:
    """1,797 images `0000.png` …, 32x32 grey.

    The originals are 8x8 with 17 levels; bicubic upscaling, which Pillow does in integers, adds no information.
    """

    labels = tuple("0123456789")
    titles: Mapping[str, str] = {}
    identity = ""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        self.pixels, self.digits = found.images, found.target

    def items(self, labels: Sequence[str]) -> list[Item]:
        return [
            Item(str(digit), f"{index:04d}.png", handle=index)
            for index, digit in enumerate(self.digits)
            if str(digit) in labels
        ]

    def contents(self, items: Sequence[Item]) -> Iterator[bytes]:
        import numpy as np
        from PIL import Image

        pixels = np.rint(self.pixels * (255 / 16)).astype(np.uint8)
        for item in items:
            large = Image.fromarray(pixels[item.handle]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            yield png(np.asarray(large))


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> Digits:
    if images_from:
        raise UsageError(f"{recipe.name} takes no images from elsewhere: drop --archive or --source")
    return Digits()
