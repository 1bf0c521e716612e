"""Contact sheets: images of each class of a data set, and one image with augmentation."""

from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.base.config.writing import replacing
from hvdtrain.base.formatting import printable
from hvdtrain.data.augment import KINDS, Augment
from hvdtrain.data.folder import ImageFolder
from hvdtrain.data.loader import Loader, labels
from hvdtrain.data.sampling import Share

SIDE = 96  # pixels of an image
MAX_CLASSES = 20  # rows


def draw(data: ImageFolder, images: int, out: Path) -> None:
    """Writes the contact sheet as a PNG.

    There is a row for each class, and one for each kind of augmentation of the first image.

    Args:
        data: The data set.
        images: Images of each class, taken evenly from its training images.
        out: The file to write.
    """
    from matplotlib.figure import Figure

    label_of = labels(data.train).numpy()
    rows = {}
    for number, name in enumerate(data.classes[:MAX_CLASSES]):
        of_class = np.flatnonzero(label_of == number)
        picked = of_class[np.linspace(0, len(of_class) - 1, min(images, len(of_class)), dtype=int)]
        rows[name] = [_load(data, index, "none", 0) for index in picked.tolist()]
    for kind in KINDS[1:]:
        rows[f"--augment {kind}"] = [_load(data, 0, kind, epoch) for epoch in range(1, images + 1)]
    figure = Figure(figsize=(images + 2, len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), images, squeeze=False)
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        line[0].set_title(printable(name), loc="left", fontsize="small", parse_math=False)
        for panel in line:
            panel.set_axis_off()
        for panel, picture in zip(line, pictures, strict=False):
            panel.imshow(picture)
    with replacing(out) as file:
        figure.savefig(file, dpi=100, format="png")


def _load(data: ImageFolder, index: int, kind: str, epoch: int) -> Any:
    """Returns a training image as a uint8 array [SIDE, SIDE, 3]."""
    loader = Loader((data.train[index],), SIDE, 1, Augment(kind, 0))
    [(_, (images, _))] = loader.batches([Share(0, epoch, [0], 1.0, 1)])
    return images[0].permute(1, 2, 0).numpy()
