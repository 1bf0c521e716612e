"""Plots of cost: how long steps take, where a step's time goes, and what 1,000 samples cost."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hvdtrain import plot_style
from hvdtrain.formatting import three_digits
from hvdtrain.report.columns import COLUMNS
from hvdtrain.report.curves import joined
from hvdtrain.report.results import Group, format_cell
from hvdtrain.report.step_parts import shown_parts, step_parts
from hvdtrain.runs.read import Kind, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP_TIMES = (
    "Of a worker's own steps, the share that took longer than so many ms; a line is a repeat, the first steps of each "
    "worker left out. Further left is faster, steeper is steadier; the tails are what the others wait for."
)


def step_times(durations: Mapping[Kind, Sequence[Sequence[float]]]) -> "Figure | None":
    """durations: for each kind, of each repeat its workers' steps in seconds, sorted."""
    if not any(steps for repeats in durations.values() for steps in repeats):
        return None
    import numpy as np
    from matplotlib.ticker import PercentFormatter

    figure, (axes,) = plot_style.new_figure(3.2)
    ends = []
    for kind, repeats in durations.items():
        drawn = []
        for steps in filter(None, repeats):
            shares = np.linspace(0, 1, min(len(steps), 200), endpoint=False)
            ms = 1000 * np.quantile(steps, shares)
            drawn.append((ms, 100 * (1 - shares)))
            ends += [ms[0], 1000 * float(np.quantile(steps, 0.995))]
        axes.plot(*joined(drawn), color=plot_style.colour(kind), linewidth=1.1, label=kind.label)
    for share in (50, 5, 1):
        axes.axhline(share, color=plot_style.MUTED, linewidth=0.7, linestyle=":")
    plot_style.log_scale(axes, axes.xaxis, (1, 1.5, 2, 3, 5, 7))
    axes.set_xlim(0.95 * min(ends), 1.1 * max(ends))
    axes.set_yscale("log")
    axes.set_ylim(0.8, 100)
    axes.set_yticks([1, 5, 10, 50, 100], [])
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.set(xlabel="ms a step", ylabel="longer than that")
    axes.grid(True, axis="x")
    plot_style.legend(figure, [axes])
    return figure


COST = (
    "Bytes that 1,000 samples take, their processor time, and memory: of all processes of a job together, servers "
    "included. A dot is a repeat. Further left is cheaper."
)


def cost(groups: Sequence[Group], rows: Sequence[dict[str, float | None]]) -> "Figure | None":
    """Bytes and processor time of 1,000 samples, and memory: of each repeat, in a row for each kind."""
    titles = {
        "bytes_sent_per_1000_samples": "bytes sent",
        "cpu_s_per_1000_samples": "processor time, s",
        "peak_rss_mb": "peak memory, MB",
    }
    names = [name for name in titles if any((found := group[name]) and found.high for group in groups)]
    if not names:
        return None
    from matplotlib.ticker import EngFormatter

    figure, panels = plot_style.new_figure(0.75 + 0.34 * max(len(groups), 2), columns=len(names), sharey=True)
    for name, panel in zip(names, panels, strict=True):
        for place, group in enumerate(groups):
            kind = group.kind
            own = [row[name] for row in rows if Kind.of_row(row) == kind]
            values = [value for value in own if value is not None]
            plot_style.dots(panel, values, [place] * len(values), kind)
            panel.annotate(
                format_cell(group, name).text, (1, place), (4, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
        plot_style.rows(panel, [group.kind.label for group in groups])
        panel.set(title=titles[name])
        panel.set_xlim(left=0)
        panel.margins(x=0.08)
        panel.locator_params(axis="x", nbins=4)
        if COLUMNS[name].unit == "B":
            panel.xaxis.set_major_formatter(EngFormatter("B"))
    return figure


def step_time(by_kind: dict[Kind, list[Run]]) -> "Figure | None":
    rows = {kind: parts for kind, runs in by_kind.items() if (parts := step_parts(runs))}
    if not rows:
        return None
    shown = shown_parts(rows)
    figure, (axes,) = plot_style.new_figure(1.0 + 0.34 * max(len(rows), 2) + 0.2 * -(-len(shown) // 4))
    longest = max(1000 * sum(parts.values()) for parts in rows.values())
    for row, parts in enumerate(rows.values()):
        left = 0.0
        for part in shown:
            ms = 1000 * parts[part]
            label, colour, text_colour = plot_style.STEP_PARTS[part]
            axes.barh(row, ms, left=left, height=0.62, color=colour, label=None if row else label)
            if ms > 0.05 * longest:
                axes.text(left + ms / 2, row, three_digits(ms), ha="center", va="center", color=text_colour, fontsize=8)
            left += ms
        total = f"{three_digits(left)} ms"
        axes.annotate(total, (left, row), (6, 0), textcoords="offset points", va="center", weight="bold")
    plot_style.rows(axes, [kind.label for kind in rows])
    axes.set_xlim(0, longest * 1.12)
    axes.set(xlabel="ms a step")
    plot_style.legend(figure, [axes])
    return figure
