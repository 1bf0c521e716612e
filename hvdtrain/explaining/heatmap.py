"""A picture of every rank's steps, beside each other in time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.explaining.timeline import Timeline
from hvdtrain.plot_style import GRID, PAPER, RC, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_COLUMNS = 240


CAPTION = (
    "How long a worker computed in each step (data, forward, backward, optimizer), in times of the median step of "
    "the worker in the middle: red is slow, and in lockstep all wait for it; hatched is a worker that was lost. "
    "`hvdtrain explain RUN` says who was waited for, and how long."
)


def heatmap(runs: "Mapping[str, Timeline]") -> "Figure":
    """A rank × time picture of each run, by title, below each other: how long each step took the worker to compute, in
    times of the median step of the worker in the middle.
    """
    from matplotlib import rc_context
    from matplotlib.colors import LogNorm

    condensed = {title: _condensed(timeline) for title, timeline in runs.items()}
    limit = max(2.0, *(max(float(ratio.max()), 1 / float(ratio.min())) for ratio, _ in condensed.values()))
    heights = [1.0 + 0.32 * len(timeline.ranks) for timeline in runs.values()]
    with rc_context(RC):
        figure, panels = new_figure(0.4 + sum(heights), rows=len(runs), height_ratios=heights)
        for (title, timeline), axes in zip(runs.items(), panels, strict=True):
            ratio, ends = condensed[title]
            first = (timeline.computed_s + timeline.waited_s)[:, 0].max() if timeline.in_step else ends[1] - ends[0]
            edges = np.concatenate([[max(0.0, timeline.ends_s[0] - first)], ends])
            rows = np.arange(len(ratio) + 1) - 0.5
            drawn = axes.pcolormesh(edges, rows, ratio, cmap="RdBu_r", norm=LogNorm(1 / limit, limit), rasterized=True)
            for rank, stretches in timeline.absent.items():
                gone, row = [(begin, until - begin) for begin, until in stretches], timeline.ranks.index(rank)
                axes.broken_barh(gone, (row - 0.5, 1), facecolor=PAPER, edgecolor=GRID, hatch="////", linewidth=0)
            axes.set_yticks(range(len(ratio)), [f"rank {rank}" for rank in timeline.ranks])
            axes.invert_yaxis()
            axes.set_title(title, loc="left")
        panels[-1].set_xlabel("seconds of training; colour: computing in a step; hatched: the worker was gone")
        bar = figure.colorbar(drawn, ax=panels, label="× median of the middle worker", pad=0.01)
        ticks = [tick for tick in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16) if 1 / limit <= tick <= limit]
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
    return figure


def _condensed(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """[workers, columns] a step's computing in times of the median step of the worker in the middle (of two workers the
    quicker), and [columns] seconds of training where each ends, in MOST_COLUMNS columns at most.
    """
    columns = timeline.computed_s.shape[1]
    groups = np.array_split(np.arange(columns), min(MOST_COLUMNS, columns))
    computed = np.stack([timeline.computed_s[:, group].mean(1) for group in groups], axis=1)
    middle = np.sort(np.median(computed, axis=1))[(len(computed) - 1) // 2]
    return computed / middle, np.maximum.accumulate(np.array([timeline.ends_s[group[-1]] for group in groups]))
