"""Random changes to training images. They depend on seed, epoch and the image's index alone, so they are the same in
every mode and on any number of workers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

KINDS = ["none", "flip", "shift", "shift-flip", "crop-flip"]


class Augment:
    """Changes one image at a time.

    Args:
        kind: one of KINDS. `flip` mirrors an image with probability 1/2: not for images whose mirror image means
            something else, such as digits. `shift` moves it by up to an eighth of its side and fills with black.
            `shift-flip` does both (Krizhevsky & Hinton's recipe for CIFAR-10: 4 of 32 pixels). `crop-flip` mirrors, and
            in place of the middle square takes a random crop of 8 % to all of the original's area, with sides of 3:4
            to 4:3 (Szegedy et al., 2015, arXiv:1409.4842).
        seed: the job's.

    Attributes:
        crops: whether it takes a crop of the whole original, so that decoded middle squares cannot be used.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed, self.crops = kind, seed, kind == "crop-flip"

    def box(self, size: tuple[int, int], epoch: int, index: int) -> tuple[float, float, float, float]:
        """The crop of an original of (width, height): left, upper, right, lower, in pixels."""
        rng = self._rng(epoch, index, "box")
        width, height = size
        for _ in range(10):
            area = width * height * rng.uniform(0.08, 1.0)
            ratio = (3 / 4) ** rng.uniform(-1, 1)
            w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
            if w <= width and h <= height:
                left, upper = rng.uniform(0, width - w), rng.uniform(0, height - h)
                return left, upper, left + w, upper + h
        side = min(size)
        left, upper = (width - side) / 2, (height - side) / 2
        return left, upper, left + side, upper + side

    def change(self, image: Any, epoch: int, index: int) -> Any:
        """The changed square image, a uint8 tensor [3, side, side], which may share memory with the given one."""
        if self.kind == "none":
            return image
        rng = self._rng(epoch, index, "flip")
        flips, moves = rng.random() < 0.5, rng.integers(0, 2**30, 2)
        if self.kind.startswith("shift"):
            max_shift = max(1, image.shape[-1] // 8)
            image = _shift(image, *(int(move) % (2 * max_shift + 1) - max_shift for move in moves))
        return image.flip(-1) if flips and self.kind != "shift" else image

    def _rng(self, epoch: int, index: int, purpose: str) -> "np.random.Generator":
        """An independent generator for each image and purpose; the purposes have names of different lengths."""
        import numpy as np

        return np.random.default_rng([self.seed, epoch, index, len(purpose)])


def _shift(image: Any, down: int, right: int) -> Any:
    """The image moved, with black where it was not."""
    side = image.shape[-1]
    moved = image.new_zeros(image.shape)
    to_y, to_x = slice(max(0, down), side + min(0, down)), slice(max(0, right), side + min(0, right))
    from_y, from_x = slice(max(0, -down), side - max(0, down)), slice(max(0, -right), side - max(0, right))
    moved[:, to_y, to_x] = image[:, from_y, from_x]
    return moved
