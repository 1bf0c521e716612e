"""Plots of the answer: the effect, and samples/s against workers. A dot is one repeat."""

from collections.abc import Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING

from hvdtrain import plot_style
from hvdtrain.formatting import with_noun
from hvdtrain.report.comparisons import Comparison
from hvdtrain.report.paired import Estimate, log_ratios
from hvdtrain.report.verdict import effects, ratio, reach_answers, speed
from hvdtrain.runs.read import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hvdtrain.report.verdict import Margins

EFFECT = (
    "Samples/s over those of {}: small dots are the repeats, each over the same repeat of that one; the large one is "
    "their geometric mean, and the line its 95 % interval. The band is the margin, within which nobody wins. Further "
    "right is faster."
)


def effect(comparisons: Sequence[Comparison], margins: "Margins") -> "tuple[Figure | None, str]":
    """The plot, with the comparisons below each other, and its caption. None where nothing is compared."""
    found = [(of, *effects(of.by_kind, answers[0])) for of in comparisons
             if (answers := reach_answers(of.by_kind, margins))]  # fmt: skip
    if not found:
        return None, ""
    labels: list[str] = []
    for of, reference, each in found:
        labels += [of.title] * bool(of.title) + [reference.label, *(kind.label for kind in of.by_kind if kind in each)]
    figure, (axes,) = plot_style.new_figure(1.0 + 0.42 * len(labels))
    axes.axvspan(1 / (1 + margins.speed), 1 + margins.speed, color=plot_style.GRID, alpha=0.6, linewidth=0)
    axes.axvline(1, color=plot_style.INK, linewidth=0.9)
    drawn, row = [1.0], -1
    for of, reference, each in found:
        row += 2 if of.title else 1
        axes.plot([1], [row], plot_style.marker(reference), color=plot_style.colour(reference), markersize=9)
        _beside(axes, row, "1")
        for kind in (kind for kind in of.by_kind if kind in each):
            row += 1
            drawn += _ratios(axes, row, kind, each[kind], log_ratios(of.by_kind[kind], of.by_kind[reference], speed))
    plot_style.ratio_scale(axes, min(drawn), max(drawn))
    plot_style.rows(axes, labels)
    references = {reference.label for _, reference, _ in found}
    beside = references.pop() if len(references) == 1 else "the first of each comparison"
    axes.set(xlabel=f"times the samples/s of {beside}")
    return figure, EFFECT.format(beside)


def _ratios(axes: "Axes", row: int, kind: Kind, found: Estimate, logs: Sequence[float]) -> list[float]:
    """Draw a row: the repeats, and their mean with its interval. Returns what has to be on the axis."""
    import numpy as np

    dots = np.exp(logs).tolist()
    mean, low, high = ratio(found)
    text, ends = f"{mean:.2f}", []
    if low is not None and high is not None:
        axes.plot([low, high], [row, row], color=plot_style.colour(kind), linewidth=2.2, solid_capstyle="butt")
        text += f" ({low:.2f} to {high:.2f})"
        ends = [low, high] if found.n > 2 else []  # of two repeats it may be a thousandfold: it is cut
    axes.plot(dots, [row] * len(dots), "o", color=plot_style.INK, markersize=3, alpha=0.6)
    axes.plot([mean], [row], plot_style.marker(kind), color=plot_style.colour(kind), markersize=9)
    _beside(axes, row, f"{text}, n = {found.n}")
    return [*dots, *ends]


def _beside(axes: "Axes", row: float, text: str) -> None:
    axes.annotate(text, (1, row), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center")


SPEED = "A dot is a repeat, lines go through geometric means."


def throughput(comparisons: Sequence[Comparison]) -> "Figure | None":
    """Samples/s against the number of workers, of each comparison whose modes ran on several."""
    several = [of for of in comparisons if len({kind.workers for kind in of.by_kind if kind.mode != "single"}) > 1]
    if not several:
        return None
    figure, panels = plot_style.panels(len(several), 2.9)
    for of, axes in zip(several, panels, strict=True):
        lines: dict[Kind, dict[int, list[float]]] = {}  # by what all sizes have in common
        for kind, runs in of.by_kind.items():
            if speeds := [found for run in runs if (found := speed(run))]:
                lines.setdefault(kind._replace(workers=0), {})[kind.workers] = speeds
        for kind, by_size in lines.items():
            means = list(map(geometric_mean, by_size.values()))
            axes.plot(list(by_size), means, color=plot_style.colour(kind), linewidth=1.4)
            servers = with_noun(kind.servers, "server") if kind.servers else ""
            axes.plot([], [], **plot_style.dot(kind), label=", ".join(filter(None, [kind.mode, servers, kind.variant])))
            for size, speeds in by_size.items():
                axes.plot([size] * len(speeds), speeds, **plot_style.dot(kind))
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({size for by_size in lines.values() for size in by_size}))
        axes.set(xlabel="workers", title=of.title)
    panels[0].set_ylabel("samples/s")
    plot_style.legend(figure, panels)
    return figure
