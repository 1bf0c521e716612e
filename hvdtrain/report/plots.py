"""The report's plots, each with the sentence that says how to read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.report import plot_cost, plot_grid, plot_learning, style
from hvdtrain.report.curves import Curve, loss_curve
from hvdtrain.report.runs import Run, grouped
from hvdtrain.report.tables import results, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("loss", "accuracy", "throughput", "step-time", "staleness", "traffic")
GRID_NAMES = ("training-loss", "validation-loss")


@dataclass(frozen=True)
class Plot:
    """A plot: the name of its files, its title, how to read it, the SVG file's text, the PNG file's bytes."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def draw(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """Every plot that the finished runs have data for, and what had to be left out of them, one line each."""
    from matplotlib import rc_context

    members = grouped(runs)
    groups = summarise(results(runs))
    curves, notes = _curves(runs)
    with rc_context(style.RC):
        figures = (
            ("Training loss", plot_learning.LOSS, plot_learning.loss(members, curves)),
            ("Validation accuracy", plot_learning.ACCURACY, plot_learning.accuracy(members)),
            ("Throughput and scaling", plot_cost.THROUGHPUT, plot_cost.throughput(groups)),
            ("Where a step's time goes", plot_cost.STEP_TIME, plot_cost.step_time(members)),
            ("Staleness", plot_learning.STALENESS, plot_learning.staleness(members)),
            ("Traffic and memory", plot_cost.TRAFFIC, plot_cost.traffic(groups)),
        )
        return _drawn(NAMES, figures), notes


def draw_grid(runs: Sequence[Run]) -> list[Plot]:
    """Loss against time for all runs of a grid, as far as there are losses."""
    from matplotlib import rc_context

    curves, _ = _curves(runs)
    with rc_context(style.RC):
        figures = (
            ("Training loss against time", plot_grid.TRAINING, plot_grid.training(runs, curves)),
            ("Validation loss against time", plot_grid.VALIDATION, plot_grid.validation(runs)),
        )
        return _drawn(GRID_NAMES, figures)


def _curves(runs: Sequence[Run]) -> tuple[dict[Path, Curve], list[str]]:
    """The training loss of each finished run, by its folder, and what had to be left out, one line each."""
    curves, notes = {}, []
    for run in (run for members in grouped(runs).values() for run in members):
        ranks, left_out = run.steps()
        curves[run.folder] = loss_curve(ranks)
        notes += left_out
    return curves, notes


def _drawn(names: Sequence[str], figures: Sequence[tuple[str, str, "Figure | None"]]) -> list[Plot]:
    return [
        Plot(name, title, caption, style.svg(figure), style.png(figure))
        for name, (title, caption, figure) in zip(names, figures, strict=True)
        if figure
    ]
