"""The report's plots, each with a caption that says how to read it."""

from collections.abc import Sequence
from pathlib import Path

from hvdtrain import plot_style
from hvdtrain.report import plot_effect, plot_learning, step_parts
from hvdtrain.report.comparisons import Comparison, split_into_comparisons
from hvdtrain.report.page import Plot
from hvdtrain.report.verdict import DEFAULT, Margins
from hvdtrain.runs.loss_curve import LossCurve, loss_curve
from hvdtrain.runs.read import Run


def draw(runs: Sequence[Run], margins: Margins = DEFAULT) -> tuple[list[Plot], list[str]]:
    """Every plot that the finished runs have data for, and notes on steps that are missing in them, a line each."""
    from matplotlib import rc_context

    comparisons = split_into_comparisons(runs)
    curves, notes = _loss_curves(comparisons)
    with rc_context(plot_style.RC):
        effect, about_effect = plot_effect.effect(comparisons, margins)
        drawn = (
            ("effect", "The effect", about_effect, effect),
            ("throughput", "Samples/s against workers", plot_effect.SPEED, plot_effect.throughput(comparisons)),
            ("step-time", "Where a step's time goes", step_parts.NOTE, step_parts.step_time(comparisons)),
            ("loss", "Training loss", plot_learning.LOSS, plot_learning.loss(comparisons, curves)),
            ("accuracy", "Validation accuracy", plot_learning.ACCURACY, plot_learning.accuracy(comparisons)),
        )
    return [Plot(name, title, caption, figure) for name, title, caption, figure in drawn if figure], notes


def _loss_curves(comparisons: Sequence[Comparison]) -> tuple[dict[Path, LossCurve], list[str]]:
    """The loss of each run, by its folder; and notes on steps that are missing in it, a line each."""
    curves, notes = {}, []
    for run in (run for of in comparisons for members in of.by_kind.values() for run in members):
        steps, of_run = run.read_steps()
        curves[run.folder] = loss_curve(steps)
        notes += of_run
    return curves, notes
