"""The report's plots, each with a caption that says how to read it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain import plot_style
from hvdtrain.report import plot_effect, plot_grid, plot_learning, step_parts
from hvdtrain.report.page import Plot
from hvdtrain.report.verdict import DEFAULT, Margins
from hvdtrain.runs.loss_curve import LossCurve, loss_curve
from hvdtrain.runs.read import Kind, Run, finished_by_kind


def draw(runs: Sequence[Run], margins: Margins = DEFAULT) -> tuple[list[Plot], list[str]]:
    """Every plot that the finished runs have data for, and notes on steps that are missing in them, a line each."""
    from matplotlib import rc_context

    by_kind = finished_by_kind(runs)
    curves, notes = _loss_curves(by_kind)
    with rc_context(plot_style.RC):
        effect, about_effect = plot_effect.effect(by_kind, margins)
        drawn = (
            ("effect", "The effect", about_effect, effect),
            ("throughput", "Samples/s against workers", plot_effect.SPEED, plot_effect.throughput(by_kind)),
            ("step-time", "Where a step's time goes", step_parts.NOTE, step_parts.step_time(by_kind)),
            ("loss", "Training loss", plot_learning.LOSS, plot_learning.loss(by_kind, curves)),
            ("accuracy", "Validation accuracy", plot_learning.ACCURACY, plot_learning.accuracy(by_kind)),
        )
    return [Plot(name, title, caption, figure) for name, title, caption, figure in drawn if figure], notes


def draw_grid(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """An epoch's time against batch, and loss against time, for all runs of a grid; and notes as draw has them."""
    from matplotlib import rc_context

    curves, notes = _loss_curves(finished_by_kind(runs))
    with rc_context(plot_style.RC):
        drawn = (
            ("batches", "Time of an epoch against batch", plot_grid.BATCHES, plot_grid.batches(runs)),
            ("training-loss", "Training loss against time", plot_grid.TRAINING, plot_grid.training(runs, curves)),
            ("validation-loss", "Validation loss against time", plot_grid.VALIDATION, plot_grid.validation(runs)),
        )
    return [Plot(name, title, caption, figure) for name, title, caption, figure in drawn if figure], notes


def _loss_curves(by_kind: Mapping[Kind, Sequence[Run]]) -> tuple[dict[Path, LossCurve], list[str]]:
    """The loss of each run, by its folder; and notes on steps that are missing in it, a line each."""
    curves, notes = {}, []
    for run in (run for members in by_kind.values() for run in members):
        steps, of_run = run.read_steps()
        curves[run.folder] = loss_curve(steps)
        notes += of_run
    return curves, notes
