"""Plots of learning: loss and accuracy."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain import plot_style
from hvdtrain.formatting import with_noun
from hvdtrain.report.comparisons import Comparison
from hvdtrain.report.curves import Line, draw_curves
from hvdtrain.runs.loss_curve import LossCurve
from hvdtrain.runs.read import Kind, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RunsByKind = dict[Kind, list[Run]]

LOSS = (
    "Lines: cross-entropy on the training batches, one line for each repeat. Marks: on the validation images. Against "
    "time it says how soon, against samples how well each was used: the same mathematics lies on itself there."
)


def loss(comparisons: Sequence[Comparison], curves: Mapping[Path, LossCurve]) -> "Figure | None":
    panels: dict[str, list[Line]] = {}
    for workers, by_kind in _panels(comparisons):
        runs = [run for members in by_kind.values() for run in members]
        time, samples = (panels.setdefault(f"{workers}, against {what}", []) for what in ("time", "samples"))
        for run in runs:
            curve, drawn = curves[run.folder], _line_style(run.kind, by_kind)
            time.append(Line(curve.seconds, curve.loss, drawn))
            samples.append(Line(curve.samples, curve.loss, drawn))
        for run in runs:
            evaluations, label = run.summary.evaluations, f"{_line_style(run.kind, by_kind)['label']}: validation"
            marks = _marker_style(run.kind) | {"linestyle": "", "label": label}
            losses = [e.val_loss for e in evaluations]
            time.append(Line([e.train_s for e in evaluations], losses, marks))
            samples.append(Line([e.samples for e in evaluations], losses, marks))
    return draw_curves(panels, ["seconds of training", "samples trained on"], "cross-entropy", columns=2)


def _panels(comparisons: Sequence[Comparison]) -> Iterable[tuple[str, RunsByKind]]:
    """The runs of each panel, with its title: those of a comparison on one number of workers, with the baseline."""
    for of in comparisons:
        for size in sorted({kind.workers for kind in of.by_kind if kind.is_distributed}) or [1]:
            own = {k: runs for k, runs in of.by_kind.items() if k.workers == size or not k.is_distributed}
            yield ", ".join(filter(None, [of.title, with_noun(size, "worker")])), own


def _line_style(kind: Kind, by_kind: RunsByKind) -> dict[str, Any]:
    """Colour by mode; a line style and a label for each of its numbers of servers, and variants."""
    alike = sorted({(other.servers, other.variant) for other in by_kind if other.mode == kind.mode})
    servers = with_noun(kind.servers, "server") if len({count for count, _ in alike}) > 1 else ""
    return {
        "color": plot_style.colour(kind),
        "linestyle": plot_style.LINES[alike.index((kind.servers, kind.variant)) % len(plot_style.LINES)],
        "linewidth": 1.6 if len(by_kind[kind]) == 1 else 1.0,
        "label": ", ".join(filter(None, [kind.mode, servers, kind.variant])),
    }


def _marker_style(kind: Kind) -> dict[str, Any]:
    return {
        "marker": plot_style.marker(kind), "markersize": 3.6, "markerfacecolor": "none",
        "markeredgecolor": plot_style.colour(kind), "markeredgewidth": 0.9,
    }  # fmt: skip


ACCURACY = "On all validation images, after so many seconds of training. The dotted line is the target."


def accuracy(comparisons: Sequence[Comparison]) -> "Figure | None":
    panels = {}
    for workers, by_kind in _panels(comparisons):
        runs = [run for members in by_kind.values() for run in members]
        panels[workers] = [
            Line(
                [e.train_s for e in run.summary.evaluations], [e.val_accuracy for e in run.summary.evaluations],
                _line_style(run.kind, by_kind) | _marker_style(run.kind),
            )
            for run in runs
        ]  # fmt: skip
        if target := next((run.summary.target_accuracy for run in runs), None):
            ends = [e.train_s for run in runs for e in run.summary.evaluations]
            dotted = {"color": plot_style.INK, "linewidth": 0.9, "linestyle": ":", "label": f"target {target:g}"}
            panels[workers] += [Line([0, max(ends)], [target] * 2, dotted)] if ends else []
    return draw_curves(panels, ["seconds of training"], "validation accuracy")
