"""The report's plots, each with the sentence that says how to read it."""

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.report import plot_cost, plot_learning, style
from hvdtrain.report.curves import loss_curve
from hvdtrain.report.runs import Run, grouped
from hvdtrain.report.tables import results, summarise

NAMES = ("loss", "accuracy", "throughput", "step-time", "staleness", "traffic")


@dataclass(frozen=True)
class Plot:
    """A plot: the name of its file, its title, how to read it, the SVG file's text."""

    name: str
    title: str
    caption: str
    svg: str


def draw(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """Every plot that the finished runs have data for, and what had to be left out of them, one line each."""
    from matplotlib import rc_context

    members = grouped(runs)
    groups = summarise(results(runs))
    curves, notes = {}, []
    for run in (run for runs_of_kind in members.values() for run in runs_of_kind):
        ranks, left_out = run.steps()
        curves[run.folder] = loss_curve(ranks)
        notes += left_out
    with rc_context(style.RC):
        figures = (
            ("Training loss", plot_learning.LOSS, plot_learning.loss(members, curves)),
            ("Validation accuracy", plot_learning.ACCURACY, plot_learning.accuracy(members)),
            ("Throughput and scaling", plot_cost.THROUGHPUT, plot_cost.throughput(groups)),
            ("Where a step's time goes", plot_cost.STEP_TIME, plot_cost.step_time(members)),
            ("Staleness", plot_learning.STALENESS, plot_learning.staleness(members)),
            ("Traffic and memory", plot_cost.TRAFFIC, plot_cost.traffic(groups)),
        )
        drawn = [
            Plot(name, title, caption, style.svg(figure))
            for name, (title, caption, figure) in zip(NAMES, figures, strict=True)
            if figure
        ]
    return drawn, notes
