"""Curves of learning over time and samples: thinned to few enough points for a plot, and drawn panel by panel."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain import plot_style
from hvdtrain.runs.schema import Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 50  # of one curve: enough to see its shape, few enough for a small file


@dataclass(frozen=True)
class LossCurve:
    """Points of a run's training loss: seconds of training, samples of all workers so far, mean loss."""

    seconds: list[float]
    samples: list[float]
    loss: list[float]


def loss_curve(ranks: Mapping[str, Sequence[Step]]) -> LossCurve:
    """The loss of all workers together.

    Their steps are sorted by time and cut into at most MAX_POINTS equal windows, none smaller than the number of
    workers. A point is the mean over a window, weighted by samples.
    """
    steps = [step for steps in ranks.values() for step in steps if step.loss is not None and step.samples > 0]
    steps.sort(key=lambda step: step.time)
    window_size = max(len(ranks), -(-len(steps) // MAX_POINTS))
    curve, samples_before = LossCurve([], [], []), 0.0
    for start in range(0, len(steps), max(1, window_size)):
        window = steps[start : start + window_size]
        samples = sum(step.samples for step in window)
        curve.seconds.append(sum(step.time for step in window) / len(window))
        curve.samples.append(samples_before + samples / 2)
        curve.loss.append(sum((step.loss or 0.0) * step.samples for step in window) / samples)
        samples_before += samples
    return curve


class Line(NamedTuple):
    """A curve in a panel, and how it is drawn."""

    x: Sequence[float]
    y: Sequence[float]
    style: dict[str, Any]


def joined(curves: Iterable[tuple[Iterable[float], Iterable[float]]]) -> tuple[list[float], list[float]]:
    """Curves that look alike as one with gaps, which is drawn much faster than each by itself."""
    x: list[float] = []
    y: list[float] = []
    for own_x, own_y in curves:
        x += [*own_x, math.nan]
        y += [*own_y, math.nan]
    return x, y


def draw_curves(
    panels: Mapping[str, Sequence[Line]], xlabels: Sequence[str], ylabel: str, columns: int = 3
) -> "Figure | None":
    """A panel for each title, with xlabels in turn. None without a finite value."""
    values = [y for lines in panels.values() for line in lines for y in line.y if math.isfinite(y)]
    if not values:
        return None
    figure, axes = plot_style.panels(len(panels), 2.9, columns)
    for (title, lines), panel, xlabel in zip(panels.items(), axes, cycle(xlabels), strict=False):
        for look, alike in groupby(lines, key=lambda line: line.style):
            panel.plot(*joined((line.x, line.y) for line in alike), **look)
        panel.set(xlabel=xlabel, title=title)
        panel.set_xlim(left=0)
        panel.locator_params(axis="x", nbins=6)
        panel.xaxis.set_major_formatter("{x:,.7g}")
        if max(values) > 10 * min(values) > 0:
            plot_style.log_scale(panel)
    axes[0].set_ylabel(ylabel)
    plot_style.legend(figure, axes)
    return figure
