"""Draws a contact sheet of a data set: images of each class, how many there are, and what augmentation does to them."""

from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.augment import KINDS, Augment
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.loader import Loader, labels
from hvdtrain.data.sampling import Share

SIDE = 96  # pixels of an image
MAX_CLASSES = 20  # rows


def draw(data: ImageFolder, images: int, threads: int, out: Path) -> None:
    """Write the contact sheet as a PNG.

    Args:
        images: how many of each class, taken evenly from its training images.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = range(min(len(data.classes), MAX_CLASSES))
    found = labels(data.train).numpy()
    of_class = [np.flatnonzero(found == number).tolist() for number in drawn]
    picked = [[own[i * len(own) // n] for i in range(n)] for own in of_class if (n := min(images, len(own)))]
    examples = [row[0] for row in picked[:3]]
    rows = len(picked)
    heights = [rows + 1, 0.8 * len(KINDS[1:]) * len(examples) + 0.6]
    figure = plt.figure(figsize=(11, sum(heights)), layout="constrained")
    panels: Any = figure.subfigures(2, 1, height_ratios=heights)
    top, bottom = panels
    left, right = top.subplots(1, 2, width_ratios=[max(2, images), 3])
    _grid(
        left, [_load(data, row, threads, None, 0) for row in picked], [data.classes[number] for number in drawn], images
    )
    more = f" (the first {rows} of {len(data.classes)} classes)" if len(data.classes) > rows else ""
    left.set_title(f"Training images{more}", loc="left")
    _histogram(right, data)
    axes = bottom.subplots(1, 1)
    augmented, names = [], []
    for number, sample in enumerate(examples):
        for kind in KINDS[1:]:
            epochs = range(number * images + 1, (number + 1) * images)
            changed = [_load(data, [sample], threads, Augment(kind, 0), epoch)[0] for epoch in epochs]
            augmented.append([_load(data, [sample], threads, None, 0)[0], *changed])
            names.append(kind)
    _grid(axes, augmented, names, images)
    axes.set_title("--augment: the image, and what later epochs may see of it", loc="left")
    figure.savefig(out, dpi=100)
    plt.close(figure)


def _load(data: ImageFolder, indices: list[int], threads: int, augment: Augment | None, epoch: int) -> list[Any]:
    """These training images as uint8 arrays [SIDE, SIDE, 3]."""
    chosen = tuple(data.train[i] for i in indices)
    share = Share(0, epoch, list(range(len(indices))), 1.0, len(indices))
    [(_, (images, _))] = Loader(chosen, SIDE, threads, augment).batches([share])
    return [image.permute(1, 2, 0).numpy() for image in images]


def _grid(axes: Any, rows: list[list[Any]], names: list[str], columns: int) -> None:
    pitch = SIDE + 4
    sheet = np.full((len(rows) * pitch, columns * pitch, 3), 255, np.uint8)
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            sheet[y * pitch : y * pitch + SIDE, x * pitch : x * pitch + SIDE] = image
    axes.imshow(sheet, interpolation="nearest")
    axes.set_yticks([y * pitch + SIDE / 2 for y in range(len(rows))], names, parse_math=False)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _histogram(axes: Any, data: ImageFolder) -> None:
    """A bar for each class: its images, stacked by part."""
    names = list(data.classes)
    y, start = np.arange(len(names)), np.zeros(len(names))
    colours = {"train": "#0456c3", "validation": "#cb7811", "test": "#49672a"}
    for part, colour in colours.items():
        counts = np.bincount(labels(getattr(data, part)).numpy(), minlength=len(names))
        if counts.sum():
            axes.barh(y, counts, left=start, color=colour, height=0.8, label=f"{part}, {counts.sum():,}")
            start += counts
    axes.set_ylim(len(names) - 0.4, -0.6)
    has_labels = len(names) <= MAX_CLASSES
    axes.set_yticks(y if has_labels else [], names if has_labels else [], parse_math=False)
    axes.set_title("Images of each class", loc="left")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.05), frameon=False, ncols=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
