"""`--dataset synthetic`: images of noise that cost nothing to read, to time training alone.

It has the shape of ImageNet's images, 224 pixels and 1,000 classes, and of so few different images that all of them
stay in memory. `--image-size` makes them smaller.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from hvdtrain.data.folder import ImageFolder

if TYPE_CHECKING:
    from torch import Tensor

NAME = "synthetic"
SIDE, CLASSES, TRAIN, VALIDATION = 224, 1000, 1280, 64
DIFFERENT = 64


@dataclass(frozen=True)
class SyntheticImage:
    """One image; those of which `number` is equal modulo DIFFERENT are equal."""

    number: int
    name: str

    def pixels(self, side: int) -> "Tensor":
        """[3, side, side] uint8, the same on every machine. Not to be changed."""
        return _noise(self.number % DIFFERENT, side)

    def read_bytes(self) -> bytes:
        """The same at SIDE pixels, as the file that it would be."""
        from hvdtrain.data.image import png

        return png(self.pixels(SIDE).permute(1, 2, 0).numpy())


@cache
def _noise(seed: int, side: int) -> "Tensor":
    import torch

    return torch.randint(256, (3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def synthetic() -> ImageFolder:
    """The data set: each image's class is its number, modulo the classes."""
    numbers = range(TRAIN + VALIDATION)
    samples = tuple((SyntheticImage(number, f"{number:04d}.png"), number % CLASSES) for number in numbers)
    classes = tuple(f"class{number:03d}" for number in range(CLASSES))
    return ImageFolder(NAME, classes, samples[:TRAIN], samples[TRAIN:], known_hash=f"{NAME}:1", image_size=SIDE)
