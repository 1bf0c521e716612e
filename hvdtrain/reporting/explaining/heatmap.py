"""A picture of every rank's steps, beside each other in time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.reporting.explaining.timeline import Timeline
from hvdtrain.reporting.plot_style import GRID, PAPER, RC, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_COLUMNS = 240
CAPTION = (
    "How long a worker computed in each step (data, forward, backward, optimizer), "
    "in times of the median step of the worker in the middle: red is slow, "
    "and in lockstep all wait for it; hatched is a worker that was not there. "
    "`hvdtrain explain RUN` says who was waited for, and how long."
)


def heatmap(runs: "Mapping[str, Timeline]") -> "Figure":
    """Draws a rank × time picture of each run, by title, below each other.

    The colour is how long each step took the worker to compute, in times of the median step of the
    worker in the middle.
    """
    from matplotlib import rc_context
    from matplotlib.colors import LogNorm

    condensed = {title: _condensed(timeline) for title, timeline in runs.items()}
    limit = 2.0
    for ratio, _ in condensed.values():
        limit = max(limit, float(ratio.max()), 1 / float(ratio.min()))
    norm = LogNorm(1 / limit, limit)
    heights = [1.0 + 0.32 * len(timeline.ranks) for timeline in runs.values()]
    with rc_context(RC):
        figure, panels = new_figure(0.4 + sum(heights), rows=len(runs), height_ratios=heights)
        for (title, timeline), axes in zip(runs.items(), panels, strict=True):
            ratio, ends = condensed[title]
            edges = np.concatenate([[_begin(timeline, ends)], ends])
            rows = np.arange(len(ratio) + 1) - 0.5
            drawn = axes.pcolormesh(edges, rows, ratio, cmap="RdBu_r", norm=norm, rasterized=True)
            _draw_absences(timeline, axes)
            axes.set_yticks(range(len(ratio)), [f"rank {rank}" for rank in timeline.ranks])
            axes.invert_yaxis()
            axes.set_title(title, loc="left")
        panels[-1].set_xlabel(
            "seconds of training; colour: computing in a step; hatched: the worker was gone"
        )
        bar = figure.colorbar(drawn, ax=panels, label="× median of the middle worker", pad=0.01)
        ticks = [tick for tick in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16) if 1 / limit <= tick <= limit]
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
    return figure


def _begin(timeline: Timeline, ends: np.ndarray) -> float:
    """Returns the seconds of training at which the first column begins."""
    if timeline.in_step:
        steps_s = timeline.computed_s + timeline.waited_s
        first_s = steps_s[:, 0].max()
    else:
        first_s = ends[1] - ends[0]
    return max(0.0, timeline.ends_s[0] - first_s)


def _draw_absences(timeline: Timeline, axes: "Axes") -> None:
    for rank, absences in timeline.absent.items():
        row = timeline.ranks.index(rank)
        spans = [(begin, until - begin) for begin, until in absences]
        axes.broken_barh(
            spans, (row - 0.5, 1), facecolor=PAPER, edgecolor=GRID, hatch="////", linewidth=0
        )


def _condensed(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Returns a timeline in MOST_COLUMNS columns at most.

    Returns:
        The computing of a step in times of the median step of the worker in the middle (of two
        workers the quicker), [workers, columns]; and the seconds of training at which each column
        ends, [columns].
    """
    columns = timeline.computed_s.shape[1]
    groups = np.array_split(np.arange(columns), min(MOST_COLUMNS, columns))
    computed = np.stack([timeline.computed_s[:, group].mean(1) for group in groups], axis=1)
    medians = np.sort(np.median(computed, axis=1))
    middle = medians[(len(computed) - 1) // 2]
    ends = np.array([timeline.ends_s[group[-1]] for group in groups])
    return computed / middle, np.maximum.accumulate(ends)
