"""The report's plots, each with a caption that says how to read it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain import plot_style
from hvdtrain.report import plot_cost, plot_effect, plot_grid, plot_learning
from hvdtrain.report.page import Plot
from hvdtrain.report.results import result_rows, summarise
from hvdtrain.report.step_parts import NOTE
from hvdtrain.report.verdict import DEFAULT, Margins
from hvdtrain.runs.live import WARM_UP
from hvdtrain.runs.loss_curve import loss_curve
from hvdtrain.runs.read import Kind, Run, finished_by_kind
from hvdtrain.runs.schema import Step, each_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In the order of the page. `loss` and `step-time` are shown in README.md.
NAMES = ("effect", "throughput", "target", "step-times", "step-time", "cost", "loss", "accuracy", "staleness")
MORE_NAMES = ("ranks", "one-step", "slow")  # of explain.pictures
GRID_NAMES = ("batches", "training-loss", "validation-loss")


def draw(runs: Sequence[Run], margins: Margins = DEFAULT) -> tuple[list[Plot], list[str]]:
    """Every plot that the finished runs have data for, and notes on steps that are missing in them, a line each."""
    from matplotlib import rc_context

    by_kind = finished_by_kind(runs)
    rows = result_rows(runs)
    groups = summarise(rows)
    steps, notes = _read_steps(by_kind)
    curves = {folder: loss_curve(ranks) for folder, ranks in steps.items()}
    with rc_context(plot_style.RC):
        effect, about_effect = plot_effect.effect(by_kind, margins)
        throughput, about_throughput = plot_effect.throughput(by_kind)
        target, about_target = plot_effect.target(by_kind)
        figures = (
            ("The effect", about_effect, effect),
            ("Samples/s against workers", about_throughput, throughput),
            ("Time to target, and accuracy", about_target, target),
            ("How long steps take", plot_cost.STEP_TIMES, plot_cost.step_times(_durations(by_kind, steps))),
            ("Where a step's time goes", NOTE, plot_cost.step_time(by_kind)),
            ("What it costs", plot_cost.COST, plot_cost.cost(groups, rows)),
            ("Training loss", plot_learning.LOSS, plot_learning.loss(by_kind, curves)),
            ("Validation accuracy", plot_learning.ACCURACY, plot_learning.accuracy(by_kind)),
            ("Staleness", plot_learning.STALENESS, plot_learning.staleness(by_kind)),
        )
    return _plots(NAMES, figures), notes


def draw_grid(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """An epoch's time against batch, and loss against time, for all runs of a grid; and notes as draw has them."""
    from matplotlib import rc_context

    steps, notes = _read_steps(finished_by_kind(runs))
    curves = {folder: loss_curve(ranks) for folder, ranks in steps.items()}
    with rc_context(plot_style.RC):
        figures = (
            ("Time of an epoch against batch", plot_grid.BATCHES, plot_grid.batches(runs)),
            ("Training loss against time", plot_grid.TRAINING, plot_grid.training(runs, curves)),
            ("Validation loss against time", plot_grid.VALIDATION, plot_grid.validation(runs)),
        )
    return _plots(GRID_NAMES, figures), notes


Steps = dict[Path, dict[str, list[Step]]]


def _read_steps(by_kind: Mapping[Kind, Sequence[Run]]) -> tuple[Steps, list[str]]:
    """The steps of each run, by its folder, then by rank; and notes on those that are missing, a line each."""
    steps, notes = Steps(), []
    for run in (run for members in by_kind.values() for run in members):
        steps[run.folder], of_run = run.read_steps()
        notes += of_run
    return steps, notes


def _durations(by_kind: Mapping[Kind, Sequence[Run]], steps: Steps) -> dict[Kind, list[list[float]]]:
    """The seconds of each repeat's steps, all its workers' together."""
    return {
        kind: [
            [s.seconds for own in steps[run.folder].values() for s in each_share(own)[WARM_UP:] if s.seconds]
            for run in runs
        ]
        for kind, runs in by_kind.items()
    }


def _plots(names: Sequence[str], figures: "Sequence[tuple[str, str, Figure | None]]") -> list[Plot]:
    return [
        Plot(name, title, caption, figure)
        for name, (title, caption, figure) in zip(names, figures, strict=True)
        if figure
    ]
