"""Plots of the answer: the effect, samples/s against workers, time to target against accuracy. A dot is one repeat."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from hvdtrain import plot_style
from hvdtrain.formatting import with_noun
from hvdtrain.report.paired import log_ratios
from hvdtrain.report.results import result_rows
from hvdtrain.report.verdict import ByKind, effects, ratio, reach_answers, speed
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import Kind, Run

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


SPEED = (
    "A dot is a repeat, lines go through geometric means. Dotted: perfect scaling of one worker, which all modes share."
)
BOUND = " A wide bar is the most that the measured network allows, were computing free."


def throughput(by_kind: ByKind) -> "tuple[Figure | None, str]":
    """Samples/s against the number of workers, and the plot's caption."""
    runs = [run for members in by_kind.values() for run in members]
    rows = [row for row in result_rows(runs) if row["samples_per_s"]]
    if not rows:
        return None, ""
    sizes = sorted({row["workers"] for row in rows})
    lines: dict[Kind, dict[int, list[float]]] = {}  # by what all sizes have in common
    for row in rows:
        line = lines.setdefault(Kind.of_row(row)._replace(workers=0), {})
        line.setdefault(row["workers"], []).append(row["samples_per_s"])

    def place(own: Kind, size: int) -> float:
        """Side by side with the other modes of this size: their repeats are about as fast."""
        there = [line for line, by_size in lines.items() if size in by_size]
        return sizes.index(size) + 0.07 * (there.index(own) - (len(there) - 1) / 2)

    figure, (axes,) = plot_style.new_figure(3.6)
    base = [speed for speeds in lines.get(Kind("single", 0, 0), {}).values() for speed in speeds]
    for kind, by_size in lines.items():
        points = {place(kind, size): speeds for size, speeds in sorted(by_size.items())}
        means = {x: geometric_mean(speeds) for x, speeds in points.items()}
        if base and 1 not in by_size:  # every mode with one worker is the baseline
            means = {0.0: geometric_mean(base)} | means
        axes.plot(list(means), list(means.values()), color=plot_style.colour(kind), linewidth=1.4)
        servers = with_noun(kind.servers, "server") if kind.servers else ""
        label = ", ".join(filter(None, [kind.mode, servers, kind.variant]))
        axes.plot([], [], **plot_style.dot(kind), label=label)
        for x, speeds in points.items():
            plot_style.dots(axes, [x] * len(speeds), speeds, kind)
    if ideals := _ideals(rows):
        places = [sizes.index(size) for size in ideals]
        axes.plot(
            places, list(ideals.values()), ":_", color=plot_style.INK, linewidth=1.4, markersize=14, label="ideal"
        )
    caption = SPEED
    for kind, members in by_kind.items():
        if bounds := [bound for run in members if (bound := network_bound(run))]:
            x = place(kind._replace(workers=0), kind.workers)
            axes.plot([x - 0.03, x + 0.03], [max(bounds)] * 2, color=plot_style.colour(kind), linewidth=4, alpha=0.7,
                      solid_capstyle="butt", label=f"bound of {kind.mode}")  # fmt: skip
            caption = SPEED + BOUND
    axes.set_xticks(range(len(sizes)), [with_noun(size, "worker") for size in sizes])
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
    axes.set(ylabel="samples/s")
    axes.grid(True, axis="y")
    plot_style.legend(figure, [axes])
    return figure, caption


def _ideals(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Perfect scaling of the baseline by number of workers; empty where there is none or nothing to scale."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["scaling_efficiency"]:
            found.setdefault(row["workers"], []).append(row["samples_per_s"] / row["scaling_efficiency"])
    return {size: geometric_mean(speeds) for size, speeds in sorted(found.items())} if len(found) > 1 else {}


TARGET = (
    "A dot is a repeat: how soon its validation accuracy was {:g}, and its accuracy in the end. Higher and further "
    "left is better.{}"
)


def target(by_kind: Mapping[Kind, Sequence[Run]]) -> "tuple[Figure | None, str]":
    """Time to the target accuracy against the last accuracy, and the plot's caption. None where no run got there."""
    runs = [run for members in by_kind.values() for run in members]
    aim = next((run.summary.target_accuracy for run in runs if run.summary.target_accuracy), None)
    if aim is None or not any(run.summary.time_to_target_s for run in runs):
        return None, ""
    figure, (axes,) = plot_style.new_figure(3.4)
    longest = max(run.summary.time_to_target_s or 0 for run in runs)
    never = False
    for kind, members in by_kind.items():
        axes.plot([], [], **plot_style.dot(kind), label=kind.label)
        ends = [(run.summary.time_to_target_s, run.summary.val_accuracy) for run in members]
        reached = [(seconds, accuracy) for seconds, accuracy in ends if seconds is not None and accuracy is not None]
        others = [accuracy for seconds, accuracy in ends if seconds is None and accuracy is not None]
        plot_style.dots(axes, [seconds for seconds, _ in reached], [accuracy for _, accuracy in reached], kind)
        plot_style.dots(axes, [1.12 * longest] * len(others), others, kind, is_hollow=True)
        never |= bool(others)
    axes.axhline(aim, color=plot_style.INK, linewidth=0.9, linestyle=":")
    if never:
        axes.axvline(1.06 * longest, color=plot_style.MUTED, linewidth=0.9)
        axes.annotate("never", (1.12 * longest, 1), (0, 2), xycoords=("data", "axes fraction"),
                      textcoords="offset points", ha="center")  # fmt: skip
    axes.set(xlabel=f"seconds of training to {aim:g}", ylabel="validation accuracy")
    axes.set_xlim(0, 1.18 * longest if never else 1.05 * longest)
    axes.grid(True)
    plot_style.legend(figure, [axes])
    return figure, TARGET.format(aim, " Hollow: it never was." if never else "")
