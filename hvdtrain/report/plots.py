"""The report's plots, each with a caption that says how to read it. A dot, and a line of learning, is one repeat."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from hvdtrain import plot_style
from hvdtrain.formatting import three_digits
from hvdtrain.plot_style import STEP_PARTS
from hvdtrain.report.answer import Answer
from hvdtrain.report.comparisons import Comparison
from hvdtrain.report.contenders import timed, whole
from hvdtrain.report.figures import expected_time, times
from hvdtrain.report.page import Plot
from hvdtrain.runs.read import Kind, Run
from hvdtrain.runs.schema import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RATIOS = "Small dots are repeats, the large one is their geometric mean, with its interval. In the band nobody leads."
PARTS = (
    "Wall time of a step, the geometric mean of the repeats, as workers spent it. Exposed communication is what a step "
    "waits for. Where servers or a ring's buckets run the optimizer, that is part of it."
)
LEARNING = (
    "Cross-entropy on the training batches, and accuracy on all validation images, after so many seconds of training; "
    "one line for each repeat. The dotted line is the target."
)
LOCAL_STEPS = (
    "Seconds of training to the target accuracy, those of all trainings over the number that got there, against the "
    "local steps from one exchange to the next; at 1 there is an exchange every step."
)
MAX_POINTS = 50  # of one line of losses: enough to see its shape, few enough for a small file
Line = tuple[list[float], list[float]]


def draw(answered: Sequence[tuple[Comparison, Answer]]) -> tuple[list[Plot], list[str]]:
    """Every plot that the finished runs have data for, and notes on steps that are missing in them, a line each."""
    from matplotlib import rc_context

    comparisons = [replace(of, runs=[run for run in of.runs if run.kind.family] or of.runs) for of, _ in answered]
    trained = [replace(of, runs=runs) for of in comparisons if (runs := whole(of.runs))]
    notes: list[str] = []
    with rc_context(plot_style.RC):
        drawn = (
            ("ratios", "Samples/s beside the ring", RATIOS, _ratios(answered)),
            ("step-time", "Where a step's time goes", PARTS, _step_time(comparisons)),
            ("learning", "Loss and accuracy", LEARNING, _learning(trained, notes)),
            ("local-steps", "Time to the target against local steps", LOCAL_STEPS, _local_steps(trained)),
        )
    return [Plot(name, title, caption, figure) for name, title, caption, figure in drawn if figure], notes


# Speeds, as ratios to the ring


def _ratios(comparisons: Sequence[tuple[Comparison, Answer]]) -> "Figure | None":
    """Samples/s over those of the ring, comparisons below each other. None where nothing is compared."""
    shown = [(of, answer.data) for of, answer in comparisons if len(answer.data["runs"]) > 1]
    if not shown:
        return None
    labels = [text for of, data in shown for text in (of.title, *(row["run"] for row in data["runs"])) if text]
    margin = shown[0][1]["margin"]
    figure, (axes,) = plot_style.new_figure(1.0 + 0.42 * len(labels))
    axes.axvspan(1 / (1 + margin), 1 + margin, color=plot_style.GRID, alpha=0.6, linewidth=0)
    axes.axvline(1, color=plot_style.INK, linewidth=0.9)
    drawn, place = [1.0], -1
    for of, data in shown:
        place += bool(of.title)
        for row in data["runs"]:
            place += 1
            drawn += _ratio_row(axes, place, row)
    plot_style.ratio_scale(axes, min(drawn), max(drawn))
    plot_style.rows(axes, labels)
    references = dict.fromkeys(data["beside"] for _, data in shown)
    axes.set(xlabel=f"times the samples/s of the {' or '.join(references)}")
    return figure


def _ratio_row(axes: "Axes", place: int, row: Mapping[str, Any]) -> list[float]:
    """Draw the repeats, and their mean with its interval. Returns what has to be on the axis."""
    mean, low, high, dots = (row[name] for name in ("ratio", "ci_low", "ci_high", "ratios"))
    if mean is None:
        return []
    colour, marker = plot_style.look_of(row["mode"])
    text, ends = times(mean), []
    if low is not None and high is not None and len(dots) > 1:
        axes.plot([low, high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
        text += f" ({times(low)} to {times(high)})"
        ends = [low, high] if len(dots) > 2 else []  # of two repeats it may be a thousandfold: it is cut
    axes.plot(dots, [place] * len(dots), "o", color=plot_style.INK, markersize=3, alpha=0.6)
    axes.plot([mean], [place], marker, color=colour, markersize=9)
    at = ("axes fraction", "data")
    axes.annotate(text, (1, place), (6, 0), xycoords=at, textcoords="offset points", va="center")
    return [mean, *dots, *ends]


# Where the wall time of a step went


def step_parts(runs: Sequence[Run]) -> dict[str, float]:
    """Seconds of each of STEP_PARTS in a step: shares of all repeats' time, of the geometric mean of their steps.

    So the ratio of two such sums is that of the samples/s which the answer compares. Empty where nothing was recorded.
    """
    recorded = [run.summary.step_seconds for run in runs if any(run.summary.step_seconds.values())]
    if not recorded:
        return {}
    steps = [sum(parts.get(part, 0.0) for part in STEP_PARTS) for parts in recorded]
    scale = geometric_mean(steps) / sum(steps)
    return {part: scale * sum(parts.get(part, 0.0) for parts in recorded) for part in STEP_PARTS}


def _step_time(comparisons: Sequence[Comparison]) -> "Figure | None":
    each = {of.label(kind): step_parts(timed(runs)) for of in comparisons for kind, runs in of.by_kind.items()}
    rows = {label: parts for label, parts in each.items() if parts}
    if not rows:
        return None
    shown = [part for part in STEP_PARTS if any(parts[part] for parts in rows.values())]
    figure, (axes,) = plot_style.new_figure(1.0 + 0.34 * max(len(rows), 2) + 0.2 * -(-len(shown) // 4))
    longest = max(1000 * sum(parts.values()) for parts in rows.values())
    for row, parts in enumerate(rows.values()):
        left = 0.0
        for part in shown:
            ms = 1000 * parts[part]
            label, colour, text_colour = STEP_PARTS[part]
            axes.barh(row, ms, left=left, height=0.62, color=colour, label=None if row else label)
            if ms > 0.05 * longest:
                axes.text(left + ms / 2, row, three_digits(ms), ha="center", va="center", color=text_colour, fontsize=8)
            left += ms
        total = f"{three_digits(left)} ms"
        axes.annotate(total, (left, row), (6, 0), textcoords="offset points", va="center", weight="bold")
    plot_style.rows(axes, list(rows))
    axes.set_xlim(0, longest * 1.12)
    axes.set(xlabel="ms a step")
    plot_style.legend(figure, [axes])
    return figure


# Loss and accuracy against time


def _learning(comparisons: Sequence[Comparison], notes: list[str]) -> "Figure | None":
    """A row for each comparison; what is missing is added to the notes. None where nothing was recorded."""
    shown = []
    for of in comparisons:
        losses: dict[Kind, list[Line]] = {kind: [] for kind in of.by_kind}
        for kind, run in ((kind, run) for kind, runs in of.by_kind.items() for run in runs):
            steps, missing = run.read_steps()
            losses[kind].append(loss_curve(steps))
            notes += missing
        if any(line[0] for lines in losses.values() for line in lines) or any(r.summary.evaluations for r in of.runs):
            shown.append((of, losses))
    if not shown:
        return None
    figure, axes = plot_style.new_figure(0.6 + 2.9 * len(shown), 2, len(shown))
    for (of, losses), loss, accuracy in zip(shown, axes[::2], axes[1::2], strict=True):
        for kind, runs in of.by_kind.items():
            look = _look(kind, list(of.by_kind))
            loss.plot(*_with_gaps(losses[kind]), **look)
            each = [run.summary.evaluations for run in runs]
            accuracies = _with_gaps(([e.train_s for e in es], [e.val_accuracy for e in es]) for es in each)
            accuracy.plot(*accuracies, marker=plot_style.look_of(kind.mode)[1], markersize=3.6, **look)
        if target := next((run.summary.target_accuracy for run in of.runs), None):
            accuracy.axhline(target, color=plot_style.INK, linewidth=0.9, linestyle=":", label=f"target {target:g}")
        for panel, what in ((loss, "cross-entropy"), (accuracy, "validation accuracy")):
            panel.set(xlabel="seconds of training", ylabel=what, title=of.title)
            panel.set_xlim(left=0)
            panel.grid(True)
            panel.xaxis.set_major_formatter("{x:,.7g}")
        values = [y for lines in losses.values() for line in lines for y in line[1] if math.isfinite(y)]
        if values and max(values) > 10 * min(values) > 0:
            plot_style.log_scale(loss)
    plot_style.legend(figure, axes)
    return figure


# Time to the target against local steps


def _local_steps(comparisons: Sequence[Comparison]) -> "Figure | None":
    """A panel for each comparison. None where no mode reached the target with two or more numbers of local steps."""
    shown = []
    for of in comparisons:
        points: dict[Kind, dict[int, float]] = {}  # of a kind without its options, seconds by local steps
        for kind, runs in of.by_kind.items():
            seconds, steps = expected_time(runs)["seconds"], runs[0].local_steps
            if seconds is not None:
                of_mode = points.setdefault(kind._replace(variant=""), {})
                of_mode[steps] = min(seconds, of_mode.get(steps, seconds))
        if any(len(of_mode) > 1 for of_mode in points.values()):
            shown.append((of, points))
    if not shown:
        return None
    figure, panels = plot_style.new_figure(0.6 + 2.6 * len(shown), 1, len(shown))
    for (of, points), axes in zip(shown, panels, strict=True):
        for kind, of_mode in points.items():
            line, look = zip(*sorted(of_mode.items()), strict=True), plot_style.look_of(kind.mode)
            axes.plot(*line, color=look[0], marker=look[1], linewidth=1.0, label=kind.label)
        axes.set_xscale("log")
        axes.set_xticks(sorted({steps for of_mode in points.values() for steps in of_mode}))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:,.0f}")
        plot_style.log_scale(axes)
        axes.set(xlabel="local steps", ylabel="seconds to the target", title=of.title)
        axes.grid(True)
    plot_style.legend(figure, panels)
    return figure


def loss_curve(ranks: Mapping[str, Sequence[Step]]) -> Line:
    """The loss of all workers together: seconds of training, and the mean loss there.

    Their steps are sorted by time and cut into at most MAX_POINTS equal windows, none smaller than the number of
    workers. A point is the mean over a window, of losses weighted by samples.
    """
    steps = [step for steps in ranks.values() for step in steps if step.loss is not None and step.samples > 0]
    steps.sort(key=lambda step: step.time)
    size = max(len(ranks), -(-len(steps) // MAX_POINTS), 1)
    windows = [steps[start : start + size] for start in range(0, len(steps), size)]
    seconds = [sum(step.time for step in window) / len(window) for window in windows]
    samples = [sum(step.samples for step in window) for window in windows]
    losses = [sum((step.loss or 0.0) * step.samples for step in window) for window in windows]
    return seconds, [loss / number for loss, number in zip(losses, samples, strict=True)]


def _look(kind: Kind, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Colour by mode, and a line style for each of its kinds."""
    alike = next(list(same) for mode, same in groupby(kinds, key=lambda other: other.mode) if mode == kind.mode)
    style = plot_style.LINES[alike.index(kind) % len(plot_style.LINES)]
    return {"color": plot_style.colour(kind), "linestyle": style, "linewidth": 1.0, "label": kind.label}


def _with_gaps(lines: Iterable[Line]) -> Line:
    """Lines that look alike as one with gaps, which is drawn much faster than each by itself."""
    x: list[float] = []
    y: list[float] = []
    for line_x, line_y in lines:
        x += [*line_x, math.nan]
        y += [*(value if math.isfinite(value) else math.nan for value in line_y), math.nan]
    return x, y
