"""The plot of learning: loss and accuracy against time."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain import plot_style
from hvdtrain.report.comparisons import Comparison
from hvdtrain.runs.loss_curve import LossCurve
from hvdtrain.runs.read import Kind, Run

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
        losses: list[tuple[float, float]] = []
        for kind, runs in of.by_kind.items():
            look = _look(kind, list(of.by_kind))
            own = [point for run in runs for point in _gap(curves[run.folder].seconds, curves[run.folder].loss)]
            loss.plot(*_columns(own), **look)
            losses += own
            reached = [point for run in runs for point in _gap(*_evaluations(run))]
            accuracy.plot(*_columns(reached), marker=plot_style.marker(kind), markersize=3.6, **look)
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


def _evaluations(run: Run) -> tuple[list[float], list[float]]:
    return [e.train_s for e in run.summary.evaluations], [e.val_accuracy for e in run.summary.evaluations]


def _gap(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """The points of a curve that end with a gap: curves that look alike are drawn much faster as one."""
    return [*zip(x, y, strict=True), (math.nan, math.nan)]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y if math.isfinite(y) else math.nan for _, y in points]


def _finish(axes: "Axes", what: str, title: str, points: Sequence[tuple[float, float]] = ()) -> None:
    axes.set(xlabel="seconds of training", ylabel=what, title=title)
    axes.set_xlim(left=0)
    axes.grid(True)
    axes.xaxis.set_major_formatter("{x:,.7g}")
    values = [y for _, y in points if math.isfinite(y)]
    if values and max(values) > 10 * min(values) > 0:
        plot_style.log_scale(axes)
