"""The plot of learning: loss and accuracy against time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain import plot_style
from hvdtrain.report.comparisons import Comparison
from hvdtrain.runs.loss_curve import LossCurve
from hvdtrain.runs.read import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEARNING = (
    "Cross-entropy on the training batches, and accuracy on all validation images, after so many seconds of training; "
    "one line for each repeat. The dotted line is the target."
)


def learning(comparisons: Sequence[Comparison], curves: Mapping[Path, LossCurve]) -> "Figure | None":
    """A row for each comparison. None where nothing was recorded."""
    shown = [of for of in comparisons if any(curves[run.folder].loss or run.summary.evaluations for run in of.runs)]
    if not shown:
        return None
    figure, axes = plot_style.new_figure(0.6 + 2.9 * len(shown), 2, len(shown))
    for of, loss, accuracy in zip(shown, axes[::2], axes[1::2], strict=True):
        losses: list[float] = []
        for kind, runs in of.by_kind.items():
            look = _look(kind, list(of.by_kind))
            drawn = _joined((curves[run.folder].seconds, curves[run.folder].loss) for run in runs)
            loss.plot(*drawn, **look)
            losses += drawn[1]
            each = [run.summary.evaluations for run in runs]
            reached = _joined(([e.train_s for e in own], [e.val_accuracy for e in own]) for own in each)
            accuracy.plot(*reached, marker=plot_style.marker(kind), markersize=3.6, **look)
        if target := next((run.summary.target_accuracy for run in of.runs), None):
            accuracy.axhline(target, color=plot_style.INK, linewidth=0.9, linestyle=":", label=f"target {target:g}")
        _finish(loss, "cross-entropy", of.title, losses)
        _finish(accuracy, "validation accuracy", of.title)
    plot_style.legend(figure, axes)
    return figure


def _look(kind: Kind, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Colour by mode, and a line style for each of its kinds."""
    alike = next(list(own) for mode, own in groupby(kinds, key=lambda other: other.mode) if mode == kind.mode)
    style = plot_style.LINES[alike.index(kind) % len(plot_style.LINES)]
    return {"color": plot_style.colour(kind), "linestyle": style, "linewidth": 1.0, "label": kind.label}


def _joined(curves: Iterable[tuple[Iterable[float], Iterable[float]]]) -> tuple[list[float], list[float]]:
    """Curves that look alike as one with gaps, which is drawn much faster than each by itself."""
    x: list[float] = []
    y: list[float] = []
    for own_x, own_y in curves:
        x += [*own_x, math.nan]
        y += [*(value if math.isfinite(value) else math.nan for value in own_y), math.nan]
    return x, y


def _finish(axes: "Axes", what: str, title: str, drawn: Sequence[float] = ()) -> None:
    axes.set(xlabel="seconds of training", ylabel=what, title=title)
    axes.set_xlim(left=0)
    axes.grid(True)
    axes.xaxis.set_major_formatter("{x:,.7g}")
    values = [y for y in drawn if math.isfinite(y)]
    if values and max(values) > 10 * min(values) > 0:
        plot_style.log_scale(axes)
