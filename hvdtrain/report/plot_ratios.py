"""The plot of speeds: ratios to the ring. A dot is one repeat."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain import plot_style
from hvdtrain.report.answer import Answer
from hvdtrain.report.comparisons import Comparison
from hvdtrain.report.figures import times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RATIOS = "Small dots are repeats, the large one is their geometric mean, with its interval. In the band nobody leads."


def ratios(comparisons: Sequence[tuple[Comparison, Answer]]) -> "Figure | None":
    """Samples/s over those of the ring, comparisons below each other. None where nothing is compared."""
    shown = [(of, answer.data) for of, answer in comparisons if len(answer.data["runs"]) > 1]
    if not shown:
        return None
    labels = [text for of, data in shown for text in (of.title, *(row["run"] for row in data["runs"])) if text]
    margin = shown[0][1]["margin"]
    figure, (axes,) = plot_style.new_figure(1.0 + 0.42 * len(labels))
    axes.axvspan(1 / (1 + margin), 1 + margin, color=plot_style.GRID, alpha=0.6, linewidth=0)
    axes.axvline(1, color=plot_style.INK, linewidth=0.9)
    drawn, place = [1.0], -1
    for of, data in shown:
        place += bool(of.title)
        for row in data["runs"]:
            place += 1
            drawn += _row(axes, place, row)
    plot_style.ratio_scale(axes, min(drawn), max(drawn))
    plot_style.rows(axes, labels)
    beside = dict.fromkeys(data["beside"] for _, data in shown)
    axes.set(xlabel=f"times the samples/s of the {' or '.join(beside)}")
    return figure


def _row(axes: "Axes", place: int, row: Mapping[str, Any]) -> list[float]:
    """Draw the repeats, and their mean with its interval. Returns what has to be on the axis."""
    mean, low, high, dots = (row[name] for name in ("ratio", "ci_low", "ci_high", "ratios"))
    if mean is None:
        return []
    colour, marker = plot_style.look_of(row["mode"])
    text, ends = times(mean), []
    if low is not None and high is not None and len(dots) > 1:
        axes.plot([low, high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
        text += f" ({times(low)} to {times(high)})"
        ends = [low, high] if len(dots) > 2 else []  # of two repeats it may be a thousandfold: it is cut
    axes.plot(dots, [place] * len(dots), "o", color=plot_style.INK, markersize=3, alpha=0.6)
    axes.plot([mean], [place], marker, color=colour, markersize=9)
    at = ("axes fraction", "data")
    axes.annotate(text, (1, place), (6, 0), xycoords=at, textcoords="offset points", va="center")
    return [mean, *dots, *ends]
