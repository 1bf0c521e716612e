"""Where the wall time of a step went: the parts that ranks recorded."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING

from hvdtrain import plot_style
from hvdtrain.formatting import three_digits
from hvdtrain.plot_style import STEP_PARTS
from hvdtrain.report.comparisons import Comparison
from hvdtrain.report.contenders import timed
from hvdtrain.runs.read import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "Wall time of a step, the geometric mean of the repeats, as workers spent it. Exposed communication is what a step "
    "waits for; where there are servers, the optimizer runs on them and is part of that."
)


def step_parts(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds of each of STEP_PARTS in a step: shares of all repeats' time, of the geometric mean of their steps.

    So the ratio of two such sums is that of the samples/s which the verdict compares. Empty where nothing was recorded.
    """
    timed = [parts for run in runs if (parts := _parts_of(run))]
    if not timed:
        return {}
    steps = [sum(parts.values()) for parts in timed]
    scale = geometric_mean(steps) / sum(steps)
    return {part: scale * sum(parts[part] for parts in timed) for part in STEP_PARTS}


def _parts_of(run: Run) -> dict[str, float]:
    recorded = run.summary.step_seconds
    return {part: recorded.get(part, 0.0) for part in STEP_PARTS} if any(recorded.values()) else {}


def _shown_parts(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The parts that some kind of run has."""
    return [part for part in STEP_PARTS if any(parts[part] for parts in found.values())]


def step_time(comparisons: Sequence[Comparison]) -> "Figure | None":
    each = {of.label(kind): step_parts(timed(runs)) for of in comparisons for kind, runs in of.by_kind.items()}
    rows = {label: parts for label, parts in each.items() if parts}
    if not rows:
        return None
    shown = _shown_parts(rows)
    figure, (axes,) = plot_style.new_figure(1.0 + 0.34 * max(len(rows), 2) + 0.2 * -(-len(shown) // 4))
    longest = max(1000 * sum(parts.values()) for parts in rows.values())
    for row, parts in enumerate(rows.values()):
        left = 0.0
        for part in shown:
            ms = 1000 * parts[part]
            label, colour, text_colour = STEP_PARTS[part]
            axes.barh(row, ms, left=left, height=0.62, color=colour, label=None if row else label)
            if ms > 0.05 * longest:
                axes.text(left + ms / 2, row, three_digits(ms), ha="center", va="center", color=text_colour, fontsize=8)
            left += ms
        total = f"{three_digits(left)} ms"
        axes.annotate(total, (left, row), (6, 0), textcoords="offset points", va="center", weight="bold")
    plot_style.rows(axes, list(rows))
    axes.set_xlim(0, longest * 1.12)
    axes.set(xlabel="ms a step")
    plot_style.legend(figure, [axes])
    return figure
