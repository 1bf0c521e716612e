"""Random changes to training images. What happens to an image depends on seed, epoch and its number alone: the same in
every mode and on any number of workers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

KINDS = ["none", "flip", "shift", "shift-flip", "crop-flip"]


class Augment:
    """Changes one image at a time.

    Args:
        kind: `flip` mirrors every other image; `shift` moves it by up to an eighth of its side, black coming in;
            `shift-flip` does both (Krizhevsky & Hinton's CIFAR-10 recipe: 4 of 32 pixels); `crop-flip` mirrors and
            takes a random part of 8 % to all of the original's area, its sides 3:4 to 4:3, in place of the middle
            square (Szegedy et al., 2015, arXiv:1409.4842). What is mirrored has to mean the same: digits do not.
        seed: the job's.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed

    @property
    def crops(self) -> bool:
        """Whether it begins with the whole original, so that decoded squares are of no use."""
        return self.kind == "crop-flip"

    def box(self, size: tuple[int, int], epoch: int, index: int) -> tuple[float, float, float, float]:
        """The part of an original of (width, height) that is taken: left, upper, right, lower, in pixels."""
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
        """A square image, [3, side, side] uint8 tensor; what is returned may be its memory."""
        if self.kind == "none":
            return image
        rng = self._rng(epoch, index, "flip")
        flips, moves = rng.random() < 0.5, rng.integers(0, 2**30, 2)
        if self.kind.startswith("shift"):
            most = max(1, image.shape[-1] // 8)
            image = _shift(image, *(int(move) % (2 * most + 1) - most for move in moves))
        return image.flip(-1) if flips and self.kind != "shift" else image

    def _rng(self, epoch: int, index: int, what: str) -> "np.random.Generator":
        """A stream of its own for each thing that is drawn: they are independent."""
        import numpy as np

        return np.random.default_rng([self.seed, epoch, index, len(what)])


def _shift(image: Any, down: int, right: int) -> Any:
    """The image moved, black where nothing was."""
    side = image.shape[-1]
    moved = image.new_zeros(image.shape)
    to_y, to_x = slice(max(0, down), side + min(0, down)), slice(max(0, right), side + min(0, right))
    from_y, from_x = slice(max(0, -down), side - max(0, down)), slice(max(0, -right), side - max(0, right))
    moved[:, to_y, to_x] = image[:, from_y, from_x]
    return moved
