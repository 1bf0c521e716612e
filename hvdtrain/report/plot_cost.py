"""Plots of cost: throughput, traffic and memory, and where a step's time goes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdtrain.report import style
from hvdtrain.report.formatting import format_cell, three_digits
from hvdtrain.report.results import Group
from hvdtrain.report.runs import Kind, Run
from hvdtrain.report.step_parts import shown_parts, step_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THROUGHPUT = (
    "Bars are geometric means of the repeats, whiskers their range. The upright mark on a bar of samples/s is what "
    "perfect scaling of the one-worker baseline, which all modes share, would give; efficiency is how much of that "
    "was reached."
)


def throughput(groups: Sequence[Group]) -> "Figure | None":
    if not any(group["samples_per_s"] for group in groups):
        return None
    has_baseline = any(group["scaling_efficiency"] for group in groups)
    figure, (left, *right) = style.new_figure(_height(len(groups)), columns=1 + has_baseline, sharey=True)
    for row, group in enumerate(groups):
        if (speed := group["samples_per_s"]) and (share := group["scaling_efficiency"]) and share.mean:
            ideal = speed.mean / share.mean
            left.plot([ideal, ideal], [row - 0.36, row + 0.36], color=style.INK, linewidth=1.6, zorder=3)
    _bars(left, groups, "samples_per_s")
    left.set(title="samples/s")
    for panel in right:
        panel.axvline(1, color=style.INK, linewidth=0.9, linestyle=":")
        _bars(panel, groups, "scaling_efficiency")
        panel.set(title="scaling efficiency")
    return figure


TRAFFIC = (
    "Bars are means of the repeats, whiskers their range; all processes of a job together, servers "
    "included. Shorter is cheaper."
)


def traffic(groups: Sequence[Group]) -> "Figure | None":
    titles = {"bytes_sent_per_step": "sent per step", "peak_rss_mb": "peak memory, MB"}
    names = [name for name in titles if any((found := group[name]) and found.high for group in groups)]
    if not names:
        return None
    from matplotlib.ticker import EngFormatter

    figure, panels = style.new_figure(_height(len(groups)), columns=len(names), sharey=True)
    for name, panel in zip(names, panels, strict=True):
        _bars(panel, groups, name)
        panel.set(title=titles[name])
        if name == "bytes_sent_per_step":
            panel.xaxis.set_major_formatter(EngFormatter("B"))
    return figure


def _height(rows: int) -> float:
    return 0.75 + 0.34 * max(rows, 2)


def _bars(axes: "Axes", groups: Sequence[Group], name: str) -> None:
    """A bar for each group, the first on top, with its range; beside the panel both as text."""
    for row, group in enumerate(groups):
        spread = group[name]
        if not spread:
            continue
        axes.barh(row, spread.mean, height=0.62, color=style.colour(group.kind))
        if spread.low < spread.high:
            axes.plot([spread.low, spread.high], [row, row], "|-", color=style.INK, linewidth=1.2, markersize=7)
        mean, detail = format_cell(group, name)
        text = f"{mean} ({detail})" if detail else mean
        axes.annotate(
            text, (1, row), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    axes.set_yticks(range(len(groups)), [group.kind.label for group in groups])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=4)
    axes.grid(True, axis="x")


def step_time(by_kind: dict[Kind, list[Run]]) -> "Figure | None":
    rows = {kind: parts for kind, runs in by_kind.items() if (parts := step_parts(runs))}
    if not rows:
        return None
    shown = shown_parts(rows)
    figure, (axes,) = style.new_figure(_height(len(rows)) + 0.25 + 0.2 * -(-len(shown) // 4))
    longest = max(1000 * sum(parts.values()) for parts in rows.values())
    for row, parts in enumerate(rows.values()):
        left = 0.0
        for part in shown:
            ms = 1000 * parts[part]
            label, colour, text_colour = style.STEP_PARTS[part]
            axes.barh(row, ms, left=left, height=0.62, color=colour, label=None if row else label)
            if ms > 0.05 * longest:
                axes.text(left + ms / 2, row, three_digits(ms), ha="center", va="center", color=text_colour, fontsize=8)
            left += ms
        total = f"{three_digits(left)} ms"
        axes.annotate(total, (left, row), (6, 0), textcoords="offset points", va="center", weight="bold")
    axes.set_yticks(range(len(rows)), [kind.label for kind in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, longest * 1.12)
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="ms a step")
    axes.grid(True, axis="x")
    style.legend(figure, [axes], columns=4)
    return figure
