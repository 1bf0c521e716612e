"""Real handwritten digits that need no download: scikit-learn carries them."""

from collections.abc import Iterator

from hvdtrain.data import build

IMAGES = 1797
SIDE = 32  # pixels; the smallest image that a VGG can halve five times


def count() -> int:
    """How many images there are."""
    return IMAGES


def images(seed: int) -> Iterator[tuple[str, str, bytes]]:
    """Every image: (`0`..`9`, `0000.png`.., a PNG of 32x32 grey). The seed has no part in them, only in their split.

    The originals are 8x8 with 17 levels; bicubic upscaling, in Pillow's integer arithmetic, adds no information.
    """
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    originals = load_digits()
    pixels = np.rint(originals.images * (255 / 16)).astype(np.uint8)
    for index, (image, label) in enumerate(zip(pixels, originals.target, strict=True)):
        large = Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        yield str(label), f"{index:04d}.png", build.png(np.asarray(large))
