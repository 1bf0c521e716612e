"""The report's plots, each with a caption that says how to read it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain import plot_style
from hvdtrain.report import plot_learning, plot_ratios, step_parts
from hvdtrain.report.answer import Answer
from hvdtrain.report.comparisons import Comparison
from hvdtrain.report.contenders import whole
from hvdtrain.report.page import Plot
from hvdtrain.runs.loss_curve import LossCurve, loss_curve


def draw(answered: Sequence[tuple[Comparison, Answer]]) -> tuple[list[Plot], list[str]]:
    """Every plot that the finished runs have data for, and notes on steps that are missing in them, a line each."""
    from matplotlib import rc_context

    comparisons = [replace(of, runs=[run for run in of.runs if run.kind.family] or of.runs) for of, _ in answered]
    trained = [replace(of, runs=runs) for of in comparisons if (runs := whole(of.runs))]
    curves, notes = _loss_curves(trained)
    with rc_context(plot_style.RC):
        drawn = (
            ("ratios", "Samples/s beside the ring", plot_ratios.RATIOS, plot_ratios.ratios(answered)),
            ("step-time", "Where a step's time goes", step_parts.NOTE, step_parts.step_time(comparisons)),
            ("learning", "Loss and accuracy", plot_learning.LEARNING, plot_learning.learning(trained, curves)),
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
