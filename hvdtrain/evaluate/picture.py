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

MAX_CLASSES_WITH_NAMES = 25  # with more, rows and columns of the matrix have no names, nor cells numbers
COLUMNS, ROWS = 4, 4  # of mistakes
MAX_NAME_LENGTH = 12


def draw(predictions: "Predictions", title: str, out: Path) -> None:
    """Write the picture as a PNG; equal predictions give equal bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(plot_style.RC):
        figure = Figure(figsize=(1.3 * plot_style.WIDTH, 0.72 * plot_style.WIDTH), layout="constrained")
        top5 = "" if predictions.top5 is None else f", top-5 {100 * predictions.top5:.2f} %"
        figure.suptitle(f"{title}: top-1 {100 * predictions.top1:.2f} %{top5}, loss {predictions.loss:.4f}", size=12)
        halves: Any = figure.subfigures(1, 2, width_ratios=(1.25, 1))
        left, right = halves
        _draw_confusion(left, predictions)
        _draw_mistakes(right, predictions)
        figure.savefig(out, dpi=150, metadata={"Software": None})


def _draw_confusion(panel: "SubFigure", predictions: "Predictions") -> None:
    from sklearn.metrics import ConfusionMatrixDisplay

    axes = panel.subplots()
    names = list(map(_shorten, predictions.classes))
    has_names = len(names) <= MAX_CLASSES_WITH_NAMES
    ConfusionMatrixDisplay(predictions.confusion, display_labels=names).plot(
        ax=axes, cmap="Blues", colorbar=False, include_values=has_names, values_format="d",
        xticks_rotation="vertical" if len(names) * max(map(len, names)) > 60 else "horizontal",
    )  # fmt: skip
    axes.set(
        xlabel="answer" if has_names else f"answer, {len(names)} classes in the order of their names",
        ylabel="true class", **{} if has_names else {"xticks": [], "yticks": []},
    )  # fmt: skip
    panel.suptitle("Confusion matrix")


def _draw_mistakes(panel: "SubFigure", predictions: "Predictions") -> None:
    """Draw the most confident mistakes: the images as the model saw them, with the true and the predicted class."""
    mistakes = predictions.mistakes
    drawn = mistakes[: COLUMNS * ROWS]
    title = f"The {len(drawn)} surest of {len(mistakes):,} mistakes" if len(mistakes) > len(drawn) else "All mistakes"
    panel.suptitle(title if mistakes else "No mistakes")
    grid: Any = panel.subplots(ROWS, COLUMNS)
    for axes in grid.flat:
        axes.axis("off")
    for axes, i, image in zip(grid.flat, drawn, _load(predictions, drawn), strict=False):
        axes.imshow(image)
        true, predicted = (_shorten(predictions.classes[of[i]]) for of in (predictions.labels, predictions.predicted))
        said = f"is {true}\nsaid {predicted}\n{predictions.confidence[i]:.1%} sure"
        axes.set_title(said, loc="center", size=8, weight="normal")


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "…"


def _load(predictions: "Predictions", images: list[int]) -> list[np.ndarray]:
    """These images as uint8 arrays [side, side, 3]."""
    if not images:
        return []
    numbers = list(range(len(images)))
    loader = Loader(tuple(predictions.samples[i] for i in images), predictions.side, threads=1)
    [(_, (images_as_seen, _))] = loader.batches([Share(0, 0, numbers, 1.0, len(numbers))])
    return [image.permute(1, 2, 0).numpy() for image in images_as_seen]
