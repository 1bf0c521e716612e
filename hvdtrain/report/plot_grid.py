"""Plots of all runs of a grid: an epoch's time against batch; loss against time, a line for each batch and size."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain import plot_style
from hvdtrain.formatting import printable, with_noun
from hvdtrain.report.comparisons import epoch_times
from hvdtrain.report.curves import Line, draw_curves
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.loss_curve import LossCurve
from hvdtrain.runs.read import Kind, Run, finished_by_kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HOW_TO_READ = "The lower and the further left, the better. The baseline of one process stands in every panel."
TRAINING = (
    "Cross-entropy on the training batches, all workers together, each point the mean of about a fiftieth of the run, "
    f"against seconds of training; one line for each repeat. {_HOW_TO_READ}"
)
VALIDATION = f"Cross-entropy on the validation images against seconds of training. {_HOW_TO_READ}"

_DASHES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))


def training(runs: Sequence[Run], curves: Mapping[Path, LossCurve]) -> "Figure | None":
    points = {run.folder: (curves[run.folder].seconds, curves[run.folder].loss) for run in runs if run.is_finished}
    return _against_time(runs, points, "training loss")


def validation(runs: Sequence[Run]) -> "Figure | None":
    evaluations = {run.folder: run.summary.evaluations for run in runs}
    points = {folder: ([e.train_s for e in own], [e.val_loss for e in own]) for folder, own in evaluations.items()}
    return _against_time(runs, points, "validation loss")


def _against_time(
    runs: Sequence[Run], points: Mapping[Path, tuple[Sequence[float], Sequence[float]]], what: str
) -> "Figure | None":
    finished = [run for members in finished_by_kind(runs).values() for run in members]
    line_styles = _line_styles(finished)
    panels = {}
    for title, drawn in _panels(finished).items():
        panels[title] = [Line(*points[run.folder], line_styles[_line_key(run)]) for run in sorted(drawn, key=_line_key)]
    return draw_curves(panels, ["seconds of training"], what)


BATCHES = (
    "Seconds of training of an epoch against the global batch: a dot is a repeat, lines go through geometric means. "
    "Where the grey line of one worker is the lowest, more workers only cost."
)


def batches(runs: Sequence[Run]) -> "Figure | None":
    """Time of an epoch against batch, a panel for each model; None unless some kind ran with several batches."""
    times = epoch_times(runs)
    models = sorted({model for model, _ in times})
    lines: dict[tuple[str, Kind], dict[int, list[float]]] = {}
    for (model, batch), kinds in times.items():
        for kind, seconds in kinds.items():
            lines.setdefault((model, kind), {})[batch] = seconds
    if not any(len(line) > 1 for line in lines.values()):
        return None
    figure, axes = plot_style.panels(len(models), 2.9)
    for model, panel in zip(models, axes, strict=True):
        for (_, kind), line in sorted((item for item in lines.items() if item[0][0] == model), key=lambda i: i[0][1]):
            dashes = plot_style.LINES[(kind.workers > 2) + (kind.servers > 1)]
            means = [geometric_mean(seconds) for seconds in line.values()]
            panel.plot(
                list(line), means, color=plot_style.colour(kind), linestyle=dashes, linewidth=1.4, label=kind.label
            )
            for batch, seconds in line.items():
                plot_style.dots(panel, [batch] * len(seconds), seconds, kind)
        plot_style.log_scale(panel, digits=(1, 1.5, 2, 3, 5, 7))
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({batch for own, batch in times if own == model}))
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.minorticks_off()
        panel.set(xlabel="global batch", title=printable(model))
    axes[0].set_ylabel("seconds an epoch")
    plot_style.legend(figure, axes)
    return figure


def _panels(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each panel by its title: a mode on a model, and with the same workers made slow, with the baseline of
    that model.
    """
    models, slows = sorted({_model(run) for run in runs}), sorted({_slow(run) for run in runs})
    panels = {}
    for model, slow in itertools.product(models, slows):
        own = [run for run in runs if _model(run) == model and (_slow(run) == slow or run.kind.mode == "single")]
        single = "single", ""
        for mode, variant in [mode for mode in dict.fromkeys(map(_mode, own)) if mode != single] or [single]:
            words = [model] * (len(models) > 1) + [mode] + [variant] * bool(variant)
            words += [f"slow: {slow}"] * (len(slows) > 1)
            panels[", ".join(words)] = [run for run in own if _mode(run) in ((mode, variant), single)]
    return panels


def _mode(run: Run) -> tuple[str, str]:
    return run.kind.mode, run.kind.variant


def _slow(run: Run) -> str:
    return printable(field_value(run, "slow.asked"))


def _model(run: Run) -> str:
    return printable(run.manifest.model or "")


class _LineKey(NamedTuple):
    """What the runs drawn in one line style have in common."""

    batch: int
    is_baseline: bool
    workers: int
    servers: int


def _line_key(run: Run) -> _LineKey:
    kind = run.kind
    return _LineKey(run.manifest.global_batch or 0, kind.mode == "single", kind.workers, kind.servers)


def _line_styles(runs: Sequence[Run]) -> dict[_LineKey, dict[str, Any]]:
    """Colour by batch, dashes by number of workers (dots: the baseline); servers are labelled where they vary."""
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("batches", plot_style.RAMP)
    keys = sorted({_line_key(run) for run in runs})
    batches = sorted({key.batch for key in keys})
    workers = sorted({key.workers for key in keys if not key.is_baseline})
    servers = {key.servers for key in keys} - {0}
    line_styles = {}
    for key in keys:
        who = "single" if key.is_baseline else with_noun(key.workers, "worker")
        who += f", {with_noun(key.servers, 'server')}" if key.servers and len(servers) > 1 else ""
        dashes = ":" if key.is_baseline else _DASHES[workers.index(key.workers) % len(_DASHES)]
        line_styles[key] = {
            "color": ramp(batches.index(key.batch) / max(1, len(batches) - 1)),
            "linestyle": dashes,
            "linewidth": 1.4,
            "marker": ".",
            "markersize": 4,
            "label": f"{who}, batch {key.batch}",
        }
    return line_styles
