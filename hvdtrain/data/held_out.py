"""Some of a part's images: without damaged ones, or without those that are held out to validate."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.base.errors import UsageError
from hvdtrain.data.folder import ManyImages
from hvdtrain.data.sampling import packing_order


class Chosen(ManyImages):
    """Some of the images of a part.

    Args:
        images: The images of the part.
        indices: The indices of those that are chosen.
    """

    def __init__(self, images: ManyImages, indices: np.ndarray) -> None:
        self.images = images
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> tuple[Any, int]:
        return self.images.image(int(self.indices[index]))

    def labels(self) -> np.ndarray:
        """Returns the class of each image, [images] int64."""
        labels: np.ndarray = self.images.labels()
        return labels[self.indices]

    def image_bytes(self) -> int:
        """Returns the bytes of all encoded images, about: by their share of the part."""
        return self.images.image_bytes() * len(self) // max(1, len(self.images))


def hold_out(images: ManyImages, share: float, classes: Sequence[str]) -> tuple[Chosen, Chosen]:
    """Splits images into those to train on and those to validate on.

    Of each class the share is held out, but at least one image, and not all. Which ones depends on
    the images' number and classes alone, so that all runs hold out the same. The images to train on
    keep their places among row groups: see row_groups.ParquetImages.

    Raises:
        UsageError: A class has one image.
    """
    labels = images.labels()
    drawn = np.random.default_rng(0).random(len(labels))
    order = np.lexsort((drawn, labels))
    starts = np.searchsorted(labels[order], np.arange(len(classes) + 1))
    is_held_out = np.zeros(len(labels), bool)
    for number, name in enumerate(classes):
        of_class = order[starts[number] : starts[number + 1]]
        if len(of_class) == 1:
            raise UsageError(f"class '{name}' has one image: none can be held out of it")
        count = min(max(round(share * len(of_class)), 1), len(of_class) - 1) if len(of_class) else 0
        is_held_out[of_class[:count]] = True
    by_row = packing_order(len(images))
    return in_place(images, ~is_held_out), Chosen(images, by_row[is_held_out[by_row]])


def in_place(images: ManyImages, is_kept: np.ndarray) -> Chosen:
    """Returns some images of a training part, which keep their places among row groups.

    Args:
        images: The images.
        is_kept: Whether each is chosen, [images] bool.
    """
    by_row = packing_order(len(images))
    kept = by_row[is_kept[by_row]]
    chosen = np.empty_like(kept)
    chosen[packing_order(len(kept))] = kept
    return Chosen(images, chosen)


def hash_with(dataset_hash: str, change: object) -> str:
    """Returns the `dataset_hash` of a data set of which some images are held out or left out.

    Args:
        dataset_hash: That of all images.
        change: The share that is held out, or what is left out.
    """
    kind, _, digest = dataset_hash.partition(":")
    changed = hashlib.sha256(f"{digest} {change!r}".encode()).hexdigest()
    return f"{kind}:{changed}"
