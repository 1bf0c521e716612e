"""Plots of learning: loss, accuracy, staleness."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.report import style
from hvdtrain.report.formatting import with_noun
from hvdtrain.report.loss_curve import LossCurve
from hvdtrain.report.runs import Kind, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RunsByKind = dict[Kind, list[Run]]

LOSS = (
    "Lines: cross-entropy on the training batches, all workers together, each point the mean of about a "
    "fiftieth of the run; one line for each repeat. Marks: loss on the validation images. Left says how "
    "soon, right says how well each sample was used: methods that do the same mathematics lie on each other "
    "there. The baseline of one process stands in every panel."
)


def loss(by_kind: RunsByKind, curves: Mapping[Path, LossCurve]) -> "Figure | None":
    if not any(curve.loss for curve in curves.values()) and not _has_evaluations(by_kind):
        return None
    panels, line_styles = _panels(by_kind), _line_styles(by_kind)
    figure, axes = style.panels(2 * len(panels), 2.9, columns=2)
    losses = []
    for (workers, drawn), left, right in zip(panels.items(), axes[::2], axes[1::2], strict=True):
        for kind, runs in drawn.items():
            left.plot([], [], **line_styles[kind], **_marker_style(kind))  # for the legend
            for run in runs:
                curve, evaluations = curves[run.folder], run.summary.evaluations
                validation = [e.val_loss for e in evaluations]
                losses += [*curve.loss, *validation]
                for panel, x, validation_x in (
                    (left, curve.seconds, [e.train_s for e in evaluations]),
                    (right, curve.samples, [e.samples for e in evaluations]),
                ):
                    panel.plot(x, curve.loss, **line_styles[kind] | {"label": None})
                    panel.plot(validation_x, validation, linestyle="", alpha=0.9, **_marker_style(kind))
        left.set(xlabel="seconds of training", ylabel="cross-entropy", title=f"{workers}, against time")
        right.set(xlabel="samples trained on", title=f"{workers}, against samples")
        right.xaxis.set_major_formatter("{x:,.0f}")
    for panel in axes:
        panel.set_xlim(left=0)
        panel.locator_params(axis="x", nbins=6)
        style.log_scale_if_wide(panel, losses)
    style.legend(figure, axes)
    return figure


def _panels(by_kind: RunsByKind) -> dict[str, RunsByKind]:
    """The runs of each panel by its title: those on one number of workers, with the baseline."""
    sizes = sorted({kind.workers for kind in by_kind if kind.mode != "single"}) or [1]
    return {
        with_noun(size, "worker"): {
            kind: runs for kind, runs in by_kind.items() if kind.workers == size or kind.mode == "single"
        }
        for size in sizes
    }


def _line_styles(by_kind: RunsByKind) -> dict[Kind, dict[str, Any]]:
    """Colour by mode; where a mode ran with several numbers of servers, a line style and a label for each."""
    line_styles = {}
    for kind, runs in by_kind.items():
        servers = sorted({other.servers for other in by_kind if other.mode == kind.mode})
        line_styles[kind] = {
            "color": style.colour(kind),
            "linestyle": style.LINES[servers.index(kind.servers) % len(style.LINES)],
            "linewidth": 1.6 if len(runs) == 1 else 1.0,
            "label": kind.mode if len(servers) == 1 else f"{kind.mode}, {with_noun(kind.servers, 'server')}",
        }
    return line_styles


def _marker_style(kind: Kind) -> dict[str, Any]:
    return {
        "marker": style.marker(kind), "markersize": 3.6, "markerfacecolor": "none",
        "markeredgecolor": style.colour(kind), "markeredgewidth": 0.9,
    }  # fmt: skip


def _has_evaluations(by_kind: RunsByKind) -> bool:
    return any(run.summary.evaluations for runs in by_kind.values() for run in runs)


ACCURACY = (
    "Accuracy on all validation images after so many seconds of training (set-up and evaluation do not "
    "count). The dotted line is the target; higher and further left is better. The baseline of one process "
    "stands in every panel."
)


def accuracy(by_kind: RunsByKind) -> "Figure | None":
    if not _has_evaluations(by_kind):
        return None
    panels, line_styles = _panels(by_kind), _line_styles(by_kind)
    figure, axes = style.panels(len(panels), 2.9)
    target = next((run.summary.target_accuracy for runs in by_kind.values() for run in runs), None)
    for (workers, drawn), panel in zip(panels.items(), axes, strict=True):
        for kind, runs in drawn.items():
            panel.plot([], [], **line_styles[kind], **_marker_style(kind))  # for the legend, even without evaluations
            for evaluations in (run.summary.evaluations for run in runs):
                seconds, reached = [e.train_s for e in evaluations], [e.val_accuracy for e in evaluations]
                panel.plot(seconds, reached, **line_styles[kind] | {"label": None}, **_marker_style(kind))
        if target:
            panel.axhline(target, color=style.INK, linewidth=0.9, linestyle=":")
            panel.annotate(
                f"target {target:g}", (1, target), (-4, -3), xycoords=("axes fraction", "data"), va="top",
                ha="right", textcoords="offset points",
            )  # fmt: skip
        panel.set(xlabel="seconds of training", title=workers)
        panel.set_xlim(left=0)
        panel.set_ylim(top=1.01)
    axes[0].set_ylabel("validation accuracy")
    style.legend(figure, axes)
    return figure


STALENESS = (
    "Share of the pushes that were applied to weights so many updates newer than those they were computed "
    "on, all repeats together. At 0 nothing is lost; a long tail means that some gradients were old news."
)
_MOST_BARS = 40


def staleness(by_kind: RunsByKind) -> "Figure | None":
    histograms = {kind: histogram for kind, runs in by_kind.items() if (histogram := _histogram(runs))}
    if not histograms:
        return None
    figure, panels = style.panels(len(histograms), 2.4)
    for axes, (kind, histogram) in zip(panels, histograms.items(), strict=True):
        width = -(-(max(histogram) + 1) // _MOST_BARS)  # updates to a bar
        total, bars = sum(histogram.values()), dict[int, float]()
        for staleness, pushes in histogram.items():
            start = staleness // width * width
            bars[start] = bars.get(start, 0.0) + 100 * pushes / total
        middles = [bar + (width - 1) / 2 for bar in bars]
        axes.bar(middles, list(bars.values()), width=0.8 * width, color=style.colour(kind))
        mean = sum(staleness * pushes for staleness, pushes in histogram.items()) / total
        axes.set(title=f"{kind.label}: mean {mean:.2f}, max. {max(histogram)}", xlabel="staleness (updates)")
        axes.set_xlim(-0.6, max(max(histogram), 3) + 0.6)
        axes.locator_params(axis="x", integer=True)
    panels[0].set_ylabel("% of pushes")
    return figure


def _histogram(runs: Sequence[Run]) -> dict[int, float]:
    histogram: dict[int, float] = {}
    for run in runs:
        for staleness, pushes in run.summary.staleness_histogram.items():
            histogram[staleness] = histogram.get(staleness, 0.0) + pushes
    return {staleness: pushes for staleness, pushes in histogram.items() if pushes}
