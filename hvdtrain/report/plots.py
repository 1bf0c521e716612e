"""The report's plots, each with a caption that says how to read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.report import plot_cost, plot_grid, plot_learning, style
from hvdtrain.report.loss_curve import LossCurve, loss_curve
from hvdtrain.report.results import result_rows, summarise
from hvdtrain.report.runs import Run, finished_by_kind
from hvdtrain.report.step_parts import NOTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("loss", "accuracy", "throughput", "step-time", "staleness", "traffic")
GRID_NAMES = ("training-loss", "validation-loss")


@dataclass(frozen=True)
class Plot:
    """A plot: the name of its files, its title, its caption, the SVG file's text, the PNG file's bytes."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def draw(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """Every plot that the finished runs have data for, and notes on steps that are missing in them, a line each."""
    from matplotlib import rc_context

    by_kind = finished_by_kind(runs)
    groups = summarise(result_rows(runs))
    curves, notes = _loss_curves(runs)
    with rc_context(style.RC):
        figures = (
            ("Training loss", plot_learning.LOSS, plot_learning.loss(by_kind, curves)),
            ("Validation accuracy", plot_learning.ACCURACY, plot_learning.accuracy(by_kind)),
            ("Throughput and scaling", plot_cost.THROUGHPUT, plot_cost.throughput(groups)),
            ("Where a step's time goes", NOTE, plot_cost.step_time(by_kind)),
            ("Staleness", plot_learning.STALENESS, plot_learning.staleness(by_kind)),
            ("Traffic and memory", plot_cost.TRAFFIC, plot_cost.traffic(groups)),
        )
        return _render(NAMES, figures), notes


def draw_grid(runs: Sequence[Run]) -> list[Plot]:
    """Loss against time for all runs of a grid, where losses were recorded."""
    from matplotlib import rc_context

    curves, _ = _loss_curves(runs)
    with rc_context(style.RC):
        figures = (
            ("Training loss against time", plot_grid.TRAINING, plot_grid.training(runs, curves)),
            ("Validation loss against time", plot_grid.VALIDATION, plot_grid.validation(runs)),
        )
        return _render(GRID_NAMES, figures)


def _loss_curves(runs: Sequence[Run]) -> tuple[dict[Path, LossCurve], list[str]]:
    """The training loss of each finished run, by its folder, and notes on missing steps, a line each."""
    curves, notes = {}, []
    for run in (run for members in finished_by_kind(runs).values() for run in members):
        ranks, run_notes = run.read_steps()
        curves[run.folder] = loss_curve(ranks)
        notes += run_notes
    return curves, notes


def _render(names: Sequence[str], figures: Sequence[tuple[str, str, "Figure | None"]]) -> list[Plot]:
    return [
        Plot(name, title, caption, style.svg(figure), style.png(figure))
        for name, (title, caption, figure) in zip(names, figures, strict=True)
        if figure
    ]
