"""Curves of learning over time and samples, drawn panel by panel."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
