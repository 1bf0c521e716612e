"""An evaluation as a picture: the confusion matrix, and the mistakes that the model was surest of."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import Share
from hvdtrain.report import style

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

    from hvdtrain.evaluate.answers import Answers

RIGHT, WRONG = style.MODES["allreduce"][0], style.PARTS["comm"][1]  # a blue and an orange
COUNTED = 20  # classes up to which cells have numbers
NAMED = 40  # and names
COLUMNS, ROWS = 4, 4  # of mistakes
LETTERS = 16  # of a class's name
TITLE: Any = {"x": 0.02, "ha": "left", "size": 9.5, "weight": "bold"}
SAID: Any = {"color": WRONG, "size": 8, "weight": "bold", "parse_math": False}


def draw(answers: "Answers", title: str, out: Path) -> None:
    """Write the picture as a PNG, the same to the byte each time."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(style.RC):
        figure = Figure(figsize=(1.3 * style.WIDTH, 0.72 * style.WIDTH), layout="constrained")
        top5 = "" if answers.top5 is None else f", top-5 {100 * answers.top5:.2f} %"
        said = f"{title}: top-1 {100 * answers.top1:.2f} %{top5}, loss {answers.loss:.4f}"
        figure.suptitle(said, x=0.012, ha="left", size=12, parse_math=False)
        halves: Any = figure.subfigures(1, 2, width_ratios=(1.25, 1))
        left, right = halves
        _matrix(left, answers)
        _worst(right, answers)
        figure.savefig(out, dpi=150, metadata={"Software": None})


def _matrix(panel: "SubFigure", answers: "Answers") -> None:
    """Shares of each class. Right answers have a colour of their own, or they would outshine the others."""
    from matplotlib.colors import LinearSegmentedColormap

    axes = panel.subplots()
    counts = answers.confusion
    classes = len(counts)
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    diagonal = np.eye(classes, dtype=bool)
    most = max(shares[~diagonal].max(), 1e-9)
    for cells, colour, top in ((diagonal, RIGHT, 1.0), (~diagonal, WRONG, most)):
        colours = LinearSegmentedColormap.from_list("", [style.PAPER, colour])
        axes.imshow(np.ma.array(shares, mask=~cells), cmap=colours, vmin=0, vmax=top, interpolation="nearest")
    if classes <= COUNTED:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                dark = shares[row, column] > 0.55 * (1.0 if row == column else most)
                ink = style.PAPER if dark else style.INK
                axes.text(column, row, f"{count:,}", ha="center", va="center", color=ink, size=8 if classes < 15 else 6)
    names = [_cut(name) for name in answers.classes] if classes <= NAMED else []
    size = 9 if classes <= COUNTED else 6
    for axis, turned in ((axes.xaxis, classes * max(map(len, names), default=0) > 60), (axes.yaxis, False)):
        axis.set_ticks(range(len(names)), names, size=size, rotation=90 if turned else 0, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(1, classes) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, classes) - 0.5, minor=True)
    axes.grid(which="minor", linewidth=0.7 if classes <= NAMED else 0)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("answer" if names else f"answer, {classes} classes in the order of their names")
    axes.set_ylabel("true class")
    worst = f"darkest orange: {100 * most:.1f} % of a class" if most > 1e-9 else "no mistakes"
    panel.suptitle(f"Confusion matrix (blue: right; {worst})", **TITLE)


def _worst(panel: "SubFigure", answers: "Answers") -> None:
    """The images of the surest mistakes as the model saw them, with both classes."""
    wrong = answers.mistakes
    shown = wrong[: COLUMNS * ROWS]
    said = f"The {len(shown)} surest of {len(wrong):,} mistakes" if len(wrong) > len(shown) else "All mistakes"
    panel.suptitle(said if wrong else "No mistakes", **TITLE)
    images = _load(answers, shown)
    grid: Any = panel.subplots(ROWS, COLUMNS)
    for axes in grid.flat:
        axes.axis("off")
    for axes, i, image in zip(grid.flat, shown, images, strict=False):
        axes.imshow(image, interpolation="nearest" if answers.side < 96 else None)
        taken, true = (_cut(answers.classes[its[i]]) for its in (answers.predicted, answers.labels))
        axes.set_title(f"is {true}\n", loc="center", size=8, weight="normal", parse_math=False)
        axes.text(0.5, 1.03, f"said {taken}", transform=axes.transAxes, ha="center", va="bottom", **SAID)
        sure = f"{100 * answers.confidence[i]:.1f} %"
        axes.text(0.5, -0.03, sure, transform=axes.transAxes, ha="center", va="top", size=8, color=style.MUTED)


def _cut(name: str) -> str:
    return name if len(name) <= LETTERS else name[: LETTERS - 1] + "…"


def _load(answers: "Answers", images: list[int]) -> list[np.ndarray]:
    """[side, side, 3] uint8 arrays."""
    if not images:
        return []
    numbers = list(range(len(images)))
    loader = Loader(tuple(answers.samples[i] for i in images), answers.side, threads=1)
    [(_, (found, _))] = loader.batches([Share(0, 0, numbers, 1.0, len(numbers))])
    return [image.permute(1, 2, 0).numpy() for image in found]
