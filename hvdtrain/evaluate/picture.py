"""The picture of an evaluation: the confusion matrix, and the most confident mistakes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain import plot_style
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import Share

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

    from hvdtrain.evaluate.predictions import Predictions

RIGHT, WRONG = plot_style.MODES["allreduce"][0], plot_style.STEP_PARTS["comm"][1]  # a blue and an orange
MAX_CLASSES_WITH_COUNTS = 20  # with more, cells of the matrix have no numbers
MAX_CLASSES_WITH_NAMES = 40  # with more, its rows and columns have no names
COLUMNS, ROWS = 4, 4  # of mistakes
MAX_NAME_LENGTH = 16
TITLE_STYLE: Any = {"x": 0.02, "ha": "left", "size": 9.5, "weight": "bold"}
PREDICTION_STYLE: Any = {"color": WRONG, "size": 8, "weight": "bold", "parse_math": False}


def draw(predictions: "Predictions", title: str, out: Path) -> None:
    """Write the picture as a PNG; equal predictions give equal bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(plot_style.RC):
        figure = Figure(figsize=(1.3 * plot_style.WIDTH, 0.72 * plot_style.WIDTH), layout="constrained")
        top5 = "" if predictions.top5 is None else f", top-5 {100 * predictions.top5:.2f} %"
        text = f"{title}: top-1 {100 * predictions.top1:.2f} %{top5}, loss {predictions.loss:.4f}"
        figure.suptitle(text, x=0.012, ha="left", size=12, parse_math=False)
        halves: Any = figure.subfigures(1, 2, width_ratios=(1.25, 1))
        left, right = halves
        _draw_confusion(left, predictions)
        _draw_mistakes(right, predictions)
        figure.savefig(out, dpi=150, metadata={"Software": None})


def _draw_confusion(panel: "SubFigure", predictions: "Predictions") -> None:
    """Draw the share of each class's images in each cell.

    Right predictions have a colour scale of their own: on a common one, mistakes would be too pale to see.
    """
    from matplotlib.colors import LinearSegmentedColormap

    axes = panel.subplots()
    counts = predictions.confusion
    classes = len(counts)
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    diagonal = np.eye(classes, dtype=bool)
    largest_mistake = max(shares[~diagonal].max(), 1e-9)
    for cells, colour, maximum in ((diagonal, RIGHT, 1.0), (~diagonal, WRONG, largest_mistake)):
        colours = LinearSegmentedColormap.from_list("", [plot_style.PAPER, colour])
        axes.imshow(np.ma.array(shares, mask=~cells), cmap=colours, vmin=0, vmax=maximum, interpolation="nearest")
    if classes <= MAX_CLASSES_WITH_COUNTS:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                is_dark = shares[row, column] > 0.55 * (1.0 if row == column else largest_mistake)
                ink = plot_style.PAPER if is_dark else plot_style.INK
                axes.text(column, row, f"{count:,}", ha="center", va="center", color=ink, size=8 if classes < 15 else 6)
    names = [_shorten(name) for name in predictions.classes] if classes <= MAX_CLASSES_WITH_NAMES else []
    size = 9 if classes <= MAX_CLASSES_WITH_COUNTS else 6
    is_crowded = classes * max(map(len, names), default=0) > 60
    for axis, rotation in ((axes.xaxis, 90 if is_crowded else 0), (axes.yaxis, 0)):
        axis.set_ticks(range(len(names)), names, size=size, rotation=rotation, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(1, classes) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, classes) - 0.5, minor=True)
    axes.grid(which="minor", linewidth=0.7 if classes <= MAX_CLASSES_WITH_NAMES else 0)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("answer" if names else f"answer, {classes} classes in the order of their names")
    axes.set_ylabel("true class")
    scale = f"darkest orange: {100 * largest_mistake:.1f} % of a class" if largest_mistake > 1e-9 else "no mistakes"
    panel.suptitle(f"Confusion matrix (blue: right; {scale})", **TITLE_STYLE)


def _draw_mistakes(panel: "SubFigure", predictions: "Predictions") -> None:
    """Draw the most confident mistakes: the images as the model saw them, with the true and the predicted class."""
    mistakes = predictions.mistakes
    drawn = mistakes[: COLUMNS * ROWS]
    title = f"The {len(drawn)} surest of {len(mistakes):,} mistakes" if len(mistakes) > len(drawn) else "All mistakes"
    panel.suptitle(title if mistakes else "No mistakes", **TITLE_STYLE)
    images = _load(predictions, drawn)
    grid: Any = panel.subplots(ROWS, COLUMNS)
    for axes in grid.flat:
        axes.axis("off")
    for axes, i, image in zip(grid.flat, drawn, images, strict=False):
        axes.imshow(image, interpolation="nearest" if predictions.side < 96 else None)
        true = _shorten(predictions.classes[predictions.labels[i]])
        predicted = _shorten(predictions.classes[predictions.predicted[i]])
        axes.set_title(f"is {true}\n", loc="center", size=8, weight="normal", parse_math=False)
        text_place = {"transform": axes.transAxes, "ha": "center", "va": "bottom"}
        axes.text(0.5, 1.03, f"said {predicted}", **text_place, **PREDICTION_STYLE)
        confidence = f"{100 * predictions.confidence[i]:.1f} %"
        axes.text(
            0.5, -0.03, confidence, transform=axes.transAxes, ha="center", va="top", size=8, color=plot_style.MUTED
        )


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "…"


def _load(predictions: "Predictions", images: list[int]) -> list[np.ndarray]:
    """These images as uint8 arrays [side, side, 3]."""
    if not images:
        return []
    numbers = list(range(len(images)))
    loader = Loader(tuple(predictions.samples[i] for i in images), predictions.side, threads=1)
    [(_, (found, _))] = loader.batches([Share(0, 0, numbers, 1.0, len(numbers))])
    return [image.permute(1, 2, 0).numpy() for image in found]
