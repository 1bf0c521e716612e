"""Augmentation: random changes to training images.

They depend on the seed, the epoch and the image's index alone, and so are the same in every mode
and on any number of workers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

KINDS = ["none", "flip", "shift", "shift-flip", "crop-flip"]


class Augment:
    """Changes one image at a time.

    Args:
        kind: One of KINDS. `flip` mirrors an image with probability 1/2; it is not for images whose
            mirror image means something else, such as digits. `shift` moves an image by up to an
            eighth of its side and fills with black. `shift-flip` does both (Krizhevsky & Hinton's
            recipe for CIFAR-10: 4 of 32 pixels). `crop-flip` mirrors, and takes a random crop in
            place of the middle square: 8 % to all of the original's area, with sides of 3:4 to 4:3
            (Szegedy et al., 2015, arXiv:1409.4842).
        seed: The seed of the job.

    Attributes:
        crops: Whether `box` chooses a crop of the original, which a cache of middle squares lacks.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self.seed = seed
        self.crops = kind == "crop-flip"

    def box(
        self, size: tuple[int, int], epoch: int, index: int
    ) -> tuple[float, float, float, float]:
        """Returns a random crop of an original.

        Args:
            size: Width and height of the original, in pixels.
            epoch: The epoch, from 1.
            index: The index of the sample.

        Returns:
            left, upper, right, lower, in pixels.
        """
        rng = self._rng(epoch, index, "box")
        width, height = size
        for _ in range(10):
            area = width * height * rng.uniform(0.08, 1.0)
            ratio = (3 / 4) ** rng.uniform(-1, 1)
            w = (area * ratio) ** 0.5
            h = (area / ratio) ** 0.5
            if w <= width and h <= height:
                left = rng.uniform(0, width - w)
                upper = rng.uniform(0, height - h)
                return left, upper, left + w, upper + h
        # No crop of ten fits a very long image: the middle square stands in.
        side = min(size)
        left = (width - side) / 2
        upper = (height - side) / 2
        return left, upper, left + side, upper + side

    def change(self, image: Any, epoch: int, index: int) -> Any:
        """Returns the changed image, which may share memory with the given one.

        Args:
            image: A uint8 tensor [3, side, side].
            epoch: The epoch, from 1.
            index: The index of the sample.
        """
        if self.kind == "none":
            return image
        rng = self._rng(epoch, index, "flip")
        flips = rng.random() < 0.5
        down, right = rng.integers(0, 2**30, 2).tolist()
        if self.kind.startswith("shift"):
            max_shift = max(1, image.shape[-1] // 8)
            positions = 2 * max_shift + 1
            image = _shift(image, down % positions - max_shift, right % positions - max_shift)
        return image.flip(-1) if flips and self.kind != "shift" else image

    def _rng(self, epoch: int, index: int, purpose: str) -> "np.random.Generator":
        """Returns an independent generator for each image and purpose.

        Purposes are told apart by the lengths of their names.
        """
        import numpy as np

        return np.random.default_rng([self.seed, epoch, index, len(purpose)])


def _shift(image: Any, down: int, right: int) -> Any:
    """Returns the image moved by these pixels, with black where it was not."""
    side = image.shape[-1]
    moved = image.new_zeros(image.shape)
    to_y = slice(max(0, down), side + min(0, down))
    to_x = slice(max(0, right), side + min(0, right))
    from_y = slice(max(0, -down), side - max(0, down))
    from_x = slice(max(0, -right), side - max(0, right))
    moved[:, to_y, to_x] = image[:, from_y, from_x]
    return moved
