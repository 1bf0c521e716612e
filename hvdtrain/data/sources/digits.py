"""Handwritten digits that scikit-learn includes, so that nothing is downloaded."""

from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.data.image import png
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Generated, Item
from hvdtrain.data.sources import Source

IS_GENERATED = True
SIDE = 32  # pixels; the smallest image that a VGG can halve five times


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    """Opens 1,797 images of 32x32 grey pixels, `0000.png` and so on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    items = [
        Item(str(digit), f"{index:04d}.png", handle=Generated(partial(_enlarged, pixels)))
        for index, (digit, pixels) in enumerate(zip(digits.target, digits.images, strict=True))
    ]
    return Source(lambda: items)


def _enlarged(pixels: Any) -> bytes:
    """Enlarges an original of 8x8 pixels with 17 levels; returns a PNG.

    Bicubic upscaling adds no information, and Pillow does it in integers, the same everywhere.
    """
    import numpy as np
    from PIL import Image

    grey = Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8))
    return png(grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
