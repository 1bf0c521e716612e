"""`--dataset synthetic`: images of noise that cost nothing to read, to time training alone.

They have the shape of ImageNet's, 224 pixels and 1,000 classes. Only DIFFERENT images differ from
each other, so that all stay in memory. `--image-size` makes them smaller.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from hvdtrain.data.folder import ImageFolder

if TYPE_CHECKING:
    from torch import Tensor

NAME = "synthetic"
SIDE = 224  # pixels
CLASSES = 1000
TRAIN = 1280  # training images
VALIDATION = 64  # validation images
DIFFERENT = 64


@dataclass(frozen=True)
class SyntheticImage:
    """One image. Images are equal if their numbers are equal modulo DIFFERENT."""

    number: int
    name: str

    def pixels(self, side: int) -> "Tensor":
        """Returns [3, side, side] uint8, the same on every machine. Must not be changed."""
        return _noise(self.number % DIFFERENT, side)

    def read_bytes(self) -> bytes:
        """Returns the image at SIDE pixels, as a PNG."""
        from hvdtrain.data.image import png

        return png(self.pixels(SIDE).permute(1, 2, 0).numpy())


@cache
def _noise(seed: int, side: int) -> "Tensor":
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (3, side, side), dtype=torch.uint8, generator=generator)


def synthetic() -> ImageFolder:
    """Returns the data set. The class of an image is its number modulo CLASSES."""
    samples = []
    for number in range(TRAIN + VALIDATION):
        samples.append((SyntheticImage(number, f"{number:04d}.png"), number % CLASSES))
    classes = tuple(f"class{number:03d}" for number in range(CLASSES))
    return ImageFolder(
        NAME,
        classes,
        train=tuple(samples[:TRAIN]),
        validation=tuple(samples[TRAIN:]),
        known_hash=f"{NAME}:1",
        image_size=SIDE,
    )
