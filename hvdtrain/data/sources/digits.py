"""Handwritten digits that scikit-learn includes, so that nothing is downloaded."""

import contextlib
import os
from collections.abc import Iterator
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
    with _unchanged_environment():
        from sklearn.datasets import load_digits

    digits = load_digits()
    items = [
        Item(str(digit), f"{index:04d}.png", handle=Generated(partial(_enlarged, pixels)))
        for index, (digit, pixels) in enumerate(zip(digits.target, digits.images, strict=True))
    ]
    return Source(lambda: items)


@contextlib.contextmanager
def _unchanged_environment() -> Iterator[None]:
    """Takes back what the block changes in the variables of this process.

    scikit-learn sets variables of OpenMP when it is imported. The ranks of `compare` would have
    them if `compare` builds the data set, and not once it is in the cache: runs that are to be
    compared must have the same.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _enlarged(pixels: Any) -> bytes:
    """Enlarges an original of 8x8 pixels with 17 levels; returns a PNG.

    Bicubic upscaling adds no information, and Pillow does it in integers, the same everywhere.
    """
    import numpy as np
    from PIL import Image

    grey = Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8))
    return png(grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
