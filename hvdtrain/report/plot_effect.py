"""Plots of the answer: the effect, and samples/s against workers. A dot is one repeat."""

from statistics import geometric_mean
from typing import TYPE_CHECKING

from hvdtrain import plot_style
from hvdtrain.formatting import with_noun
from hvdtrain.report.paired import log_ratios
from hvdtrain.report.verdict import ByKind, effects, ratio, reach_answers, speed
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


def effect(by_kind: ByKind, margins: "Margins") -> "tuple[Figure | None, str]":
    """The plot, and its caption. None where nothing is compared."""
    answers = reach_answers(by_kind, margins)
    if not answers:
        return None, ""
    import numpy as np

    reference, found = effects(by_kind, answers[0])
    kinds = [kind for kind in by_kind if kind in found]
    dots = {kind: np.exp(log_ratios(by_kind[kind], by_kind[reference], speed)) for kind in kinds}
    figure, (axes,) = plot_style.new_figure(1.0 + 0.42 * (len(kinds) + 1))
    axes.axvspan(1 / (1 + margins.speed), 1 + margins.speed, color=plot_style.GRID, alpha=0.6, linewidth=0)
    axes.axvline(1, color=plot_style.INK, linewidth=0.9)
    drawn = [1.0]
    for row, kind in enumerate(kinds, 1):
        mean, low, high = ratio(found[kind])
        text = f"{mean:.2f}"
        if low is not None and high is not None:
            axes.plot([low, high], [row, row], color=plot_style.colour(kind), linewidth=2.2, solid_capstyle="butt")
            text += f" ({low:.2f} to {high:.2f})"
            drawn += [low, high] if found[kind].n > 2 else []  # of two repeats it may be a thousandfold: it is cut
        axes.plot(dots[kind], [row] * len(dots[kind]), "o", color=plot_style.INK, markersize=3, alpha=0.6)
        axes.plot([mean], [row], plot_style.marker(kind), color=plot_style.colour(kind), markersize=9)
        _beside(axes, row, f"{text}, n = {found[kind].n}")
        drawn += [*dots[kind]]
    axes.plot([1], [0], plot_style.marker(reference), color=plot_style.colour(reference), markersize=9)
    _beside(axes, 0, "1")
    plot_style.ratio_scale(axes, min(drawn), max(drawn))
    plot_style.rows(axes, [reference.label, *(kind.label for kind in kinds)])
    axes.set(xlabel=f"times the samples/s of {reference.label}")
    return figure, EFFECT.format(reference.label)


def _beside(axes: "Axes", row: float, text: str) -> None:
    axes.annotate(text, (1, row), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center")


SPEED = "A dot is a repeat, lines go through geometric means."


def throughput(by_kind: ByKind) -> "Figure | None":
    """Samples/s against the number of workers; None where all modes ran on the same."""
    sizes = sorted({kind.workers for kind in by_kind if kind.mode != "single"})
    if len(sizes) < 2:
        return None
    figure, (axes,) = plot_style.new_figure(3.6)
    lines: dict[Kind, dict[int, list[float]]] = {}  # by what all sizes have in common
    for kind, runs in by_kind.items():
        if speeds := [found for run in runs if (found := speed(run))]:
            lines.setdefault(kind._replace(workers=0), {})[kind.workers] = speeds
    for kind, by_size in lines.items():
        means = list(map(geometric_mean, by_size.values()))
        axes.plot(list(by_size), means, color=plot_style.colour(kind), linewidth=1.4)
        servers = with_noun(kind.servers, "server") if kind.servers else ""
        axes.plot([], [], **plot_style.dot(kind), label=", ".join(filter(None, [kind.mode, servers, kind.variant])))
        for size, speeds in by_size.items():
            plot_style.dots(axes, [size] * len(speeds), speeds, kind)
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({size for by_size in lines.values() for size in by_size}))
    axes.set(xlabel="workers", ylabel="samples/s")
    axes.grid(True, axis="y")
    plot_style.legend(figure, [axes])
    return figure
