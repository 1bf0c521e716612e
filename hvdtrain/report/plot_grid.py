"""Plots across the parts of a grid: loss against time, a panel for each mode, a line for each batch and number of
workers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.report import style
from hvdtrain.report.cells import count
from hvdtrain.report.curves import Curve
from hvdtrain.report.runs import Run, grouped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_READ = "The lower and the further left, the better. The baseline of one process stands in every panel."
TRAINING = (
    "Cross-entropy on the training batches, all workers together, each point the mean of about a fiftieth of the run, "
    f"against seconds of training; one line for each repeat. {_READ}"
)
VALIDATION = f"Cross-entropy on the validation images against seconds of training. {_READ}"

_LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))
Points = tuple[Sequence[float], Sequence[float]]


def training(runs: Sequence[Run], curves: Mapping[Path, Curve]) -> "Figure | None":
    return _against_time(runs, lambda run: (curves[run.folder].seconds, curves[run.folder].loss), "training loss")


def validation(runs: Sequence[Run]) -> "Figure | None":
    def points(run: Run) -> Points:
        evaluations = run.summary.get("evaluations") or []
        return [e["train_s"] for e in evaluations], [e["val_loss"] for e in evaluations]

    return _against_time(runs, points, "validation loss")


def _against_time(runs: Sequence[Run], points: Callable[[Run], Points], what: str) -> "Figure | None":
    done = [run for members in grouped(runs).values() for run in members]
    found = {run.folder: points(run) for run in done}
    losses = [y for _, ys in found.values() for y in ys if math.isfinite(y)]
    if not losses:
        return None
    panels = _panels(done)
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    looks = _looks(done)
    figure, axes = style.new(0.4 + 0.2 * -(-len(looks) // 4) + 2.9 * rows, columns=columns, rows=rows, sharey=True)
    for (title, shown), panel in zip(panels.items(), axes, strict=False):
        for run in sorted(shown, key=_size):
            seconds, values = found[run.folder]
            panel.plot(seconds, values, **looks[_size(run)], marker="." if len(values) < 30 else "", markersize=4)
        panel.set(xlabel="seconds of training", title=title)
        panel.set_xlim(left=0)
        panel.grid(True)
        if max(losses) > 10 * min(losses) > 0:
            style.log_scale(panel)
    for panel in axes[len(panels) :]:
        panel.remove()
    for row in range(rows):
        axes[row * columns].set_ylabel(what)
    style.legend(figure, axes[: len(panels)], columns=4)
    return figure


def _panels(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """What is drawn together: the runs of a mode on a model, and the baseline with each."""
    models = sorted({_model(run) for run in runs})
    panels = {}
    for model in models:
        own = [run for run in runs if _model(run) == model]
        for mode in dict.fromkeys(run.kind.mode for run in own if run.kind.mode != "single") or ["single"]:
            title = f"{model}, {mode}" if len(models) > 1 else mode
            panels[title] = [run for run in own if run.kind.mode in (mode, "single")]
    return panels


def _model(run: Run) -> str:
    return run.manifest.get("model") or ""


class _Size(NamedTuple):
    """What a line is of: the runs of one look."""

    batch: int
    is_baseline: bool
    workers: int
    servers: int


def _size(run: Run) -> _Size:
    kind = run.kind
    return _Size(run.manifest.get("global_batch") or 0, kind.mode == "single", kind.workers, kind.servers)


def _looks(runs: Sequence[Run]) -> dict[_Size, dict[str, Any]]:
    """Colour by batch; dots are the baseline, other lines tell numbers of workers; servers are told where they vary."""
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("batches", style.RAMP)
    sizes = sorted({_size(run) for run in runs})
    batches = sorted({size.batch for size in sizes})
    workers = sorted({size.workers for size in sizes if not size.is_baseline})
    servers = {size.servers for size in sizes} - {0}
    looks = {}
    for size in sizes:
        who = "single" if size.is_baseline else count(size.workers, "worker")
        who += f", {count(size.servers, 'server')}" if size.servers and len(servers) > 1 else ""
        line = ":" if size.is_baseline else _LINES[workers.index(size.workers) % len(_LINES)]
        looks[size] = {
            "color": ramp(batches.index(size.batch) / max(1, len(batches) - 1)),
            "linestyle": line,
            "linewidth": 1.4,
            "label": f"{who}, batch {size.batch}",
        }
    return looks
