"""A picture of every rank's steps, beside each other in time."""

from pathlib import Path

import numpy as np

from hvdtrain.explain.timeline import Timeline
from hvdtrain.report.style import RC, new_figure

MOST_COLUMNS = 240


def draw_heatmap(timeline: Timeline, title: str, path: Path) -> None:
    """Write a rank × time picture, PNG, SVG or PDF by the name: how long each step took the worker on its own, in
    times of the median step.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.colors import LogNorm

    own, ends = _condensed(timeline)
    ratio = own / np.median(own)
    limit = max(2.0, float(ratio.max()), 1 / float(ratio.min()))
    with rc_context(RC):
        figure, (axes,) = new_figure(1.4 + 0.32 * len(own))
        first = (timeline.own_s + timeline.waited_s)[:, 0].max() if timeline.in_step else ends[1] - ends[0]
        edges = np.concatenate([[max(0.0, timeline.ends_s[0] - first)], ends])
        rows = np.arange(len(own) + 1) - 0.5
        drawn = axes.pcolormesh(edges, rows, ratio, cmap="RdBu_r", norm=LogNorm(1 / limit, limit), rasterized=True)
        axes.set_yticks(range(len(own)), [f"rank {rank}" for rank in timeline.ranks])
        axes.invert_yaxis()
        axes.set_xlabel("seconds of training; colour: own time of a step in times of the median step")
        axes.set_title(title, loc="left")
        bar = figure.colorbar(drawn, ax=axes, label="× median", pad=0.01)
        ticks = [tick for tick in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16) if 1 / limit <= tick <= limit]
        bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
        figure.savefig(path, dpi=150)


def shade(timeline: Timeline, width: int = 24) -> list[str]:
    """A line of characters a worker, darker where its steps took it longer on its own."""
    own, _ = _condensed(timeline, width)
    ratio = own / np.median(own)
    level = np.digitize(ratio, [1.25, 1.75, 3.0])
    return ["".join("░▒▓█"[number] for number in row) for row in level]


def _condensed(timeline: Timeline, most: int = MOST_COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """[workers, columns] own seconds, and [columns] where each ends, in at most so many columns."""
    groups = np.array_split(np.arange(timeline.own_s.shape[1]), min(most, timeline.own_s.shape[1]))
    own = np.stack([timeline.own_s[:, group].mean(1) for group in groups], axis=1)
    return own, np.maximum.accumulate(np.array([timeline.ends_s[group[-1]] for group in groups]))
