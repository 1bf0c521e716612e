"""The report's plots, each with a caption that says how to read it.

A dot is one repeat, and so is a line of a training.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from hvdtrain.base.formatting import three_digits
from hvdtrain.reporting import plot_style
from hvdtrain.reporting.answer import Answer
from hvdtrain.reporting.comparisons import ComparedRuns
from hvdtrain.reporting.figures import expected_time, format_ratio, mean_words
from hvdtrain.reporting.measures import only_trainings, speed_runs
from hvdtrain.reporting.page import Plot
from hvdtrain.reporting.plot_style import STEP_PARTS
from hvdtrain.runs.read import Kind, Run
from hvdtrain.runs.schema import Evaluation, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RATIOS = (
    "Small dots are repeats, the large one is their geometric mean, with its interval. "
    "In the band nobody leads."
)
PARTS = (
    "Wall time of a step, the geometric mean of the repeats, as workers spent it. "
    "Exposed communication is what a step waits for. "
    "Where servers or a ring's buckets run the optimizer, that is part of it."
)
LEARNING = (
    "Cross-entropy on the training batches, and accuracy on all validation images, "
    "after so many seconds of training; one line for each repeat. The dotted line is the target."
)
LOCAL_STEPS = (
    "Seconds of training to the target accuracy, those of all trainings over the number that "
    "got there, against the local steps from one exchange to the next; "
    "at 1 there is an exchange every step."
)
# Points of one line of losses: enough to see its shape, few enough for a small file.
MAX_POINTS = 50
# x and y of each point.
Line = tuple[list[float], list[float]]


def draw(answered: Sequence[tuple[ComparedRuns, Answer]]) -> tuple[list[Plot], list[str]]:
    """Draws every plot that the finished runs have data for.

    Returns:
        The plots, and notes on steps that are missing in them, a line each.
    """
    from matplotlib import rc_context

    comparisons = []
    trained = []
    for compared, _ in answered:
        # Baselines of scaling, which have no family, are no contenders.
        runs = [run for run in compared.runs if run.kind.family] or compared.runs
        comparisons.append(replace(compared, runs=runs))
        trainings = only_trainings(runs)
        if trainings:
            trained.append(replace(compared, runs=trainings))
    notes: list[str] = []
    local_steps = "Time to the target against local steps"
    with rc_context(plot_style.RC):
        drawn = (
            ("ratios", _title_of_ratios(answered), RATIOS, _ratios(answered)),
            ("step-time", "Where a step's time goes", PARTS, _step_time(comparisons)),
            ("learning", "Loss and accuracy", LEARNING, _learning(trained, notes)),
            ("local-steps", local_steps, LOCAL_STEPS, _local_steps(trained)),
        )
    plots = [Plot(name, title, caption, figure) for name, title, caption, figure in drawn if figure]
    return plots, notes


# Speeds, as ratios to the ring


def _title_of_ratios(answered: Sequence[tuple[ComparedRuns, Answer]]) -> str:
    by_time = any(answer.data["by_speed"] for _, answer in answered)
    return "How soon beside the ring" if by_time else "Samples/s beside the ring"


def _ratios(answered: Sequence[tuple[ComparedRuns, Answer]]) -> "Figure | None":
    """Draws how fast contenders are beside the ring, with comparisons below each other.

    Returns None if nothing is compared.
    """
    shown = []
    for compared, answer in answered:
        if len(answer.data["runs"]) > 1:
            shown.append((compared.title, answer.data))
    if not shown:
        return None
    labels = []
    for title, data in shown:
        if title:
            labels.append(title)
        labels += [row["run"] for row in data["runs"] if row["run"]]
    _, first_data = shown[0]
    margin = first_data["margin"]
    figure, (axes,) = plot_style.new_figure(1.0 + 0.42 * len(labels))
    axes.axvspan(1 / (1 + margin), 1 + margin, color=plot_style.GRID, alpha=0.6, linewidth=0)
    axes.axvline(1, color=plot_style.INK, linewidth=0.9)
    drawn = [1.0]
    place = 0
    for title, data in shown:
        if title:
            place += 1
        for row in data["runs"]:
            drawn += _draw_ratio(axes, place, row)
            place += 1
    plot_style.ratio_scale(axes, min(drawn), max(drawn))
    plot_style.rows(axes, labels)
    references = dict.fromkeys(data["beside"] for _, data in shown)
    beside = " or ".join(references)
    if first_data["by_speed"]:
        axes.set(xlabel=f"times as fast to {first_data['target'] or 0:g} as the {beside}")
    else:
        axes.set(xlabel=f"times the samples/s of the {beside}")
    return figure


def _draw_ratio(axes: "Axes", place: int, row: Mapping[str, Any]) -> list[float]:
    """Draws the repeats of a row of verdict.json, and their mean with its interval.

    Returns:
        The ratios that have to be on the axis.
    """
    mean = row["ratio"]
    low = row["ci_low"]
    high = row["ci_high"]
    repeats = row["ratios"]
    if mean is None:
        return []
    colour, marker = plot_style.look_of_side(row["mode"], row["family"])
    text = mean_words(row)
    ends = []
    if low is not None and high is not None and len(repeats) > 1:
        axes.plot([low, high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
        text += f" ({format_ratio(low)} to {format_ratio(high)})"
        # The interval of two repeats may be a thousandfold. The axis cuts it.
        if len(repeats) > 2:
            ends = [low, high]
    dots = [place] * len(repeats)
    axes.plot(repeats, dots, "o", color=plot_style.INK, markersize=3, alpha=0.6)
    axes.plot([mean], [place], marker, color=colour, markersize=9)
    at = ("axes fraction", "data")
    axes.annotate(text, (1, place), (6, 0), xycoords=at, textcoords="offset points", va="center")
    return [mean, *repeats, *ends]


# Where the wall time of a step went


def step_parts(runs: Sequence[Run]) -> dict[str, float]:
    """Returns the seconds of each of STEP_PARTS in a step; empty if nothing was recorded.

    They are shares of the time of all repeats, of the geometric mean of their steps. So the ratio
    of two kinds' sums is the ratio of samples/s that the answer compares.
    """
    recorded = [run.summary.step_seconds for run in runs if any(run.summary.step_seconds.values())]
    if not recorded:
        return {}
    steps = [sum(parts.get(part, 0.0) for part in STEP_PARTS) for parts in recorded]
    scale = geometric_mean(steps) / sum(steps)
    return {part: scale * sum(parts.get(part, 0.0) for parts in recorded) for part in STEP_PARTS}


def _step_time(comparisons: Sequence[ComparedRuns]) -> "Figure | None":
    """Draws a bar for each kind, of the parts of a step. None if nothing was recorded."""
    rows = {}
    for compared in comparisons:
        for kind, runs in compared.by_kind.items():
            parts = step_parts(speed_runs(runs))
            if parts:
                rows[compared.label(kind)] = parts
    if not rows:
        return None
    shown = [part for part in STEP_PARTS if any(parts[part] for parts in rows.values())]
    legend_lines = -(-len(shown) // 4)
    height = 1.0 + 0.34 * max(len(rows), 2) + 0.2 * legend_lines
    figure, (axes,) = plot_style.new_figure(height)
    longest_ms = max(1000 * sum(parts.values()) for parts in rows.values())
    for row, parts in enumerate(rows.values()):
        _draw_bar(axes, row, {part: 1000 * parts[part] for part in shown}, longest_ms)
    plot_style.rows(axes, list(rows))
    axes.set_xlim(0, longest_ms * 1.12)
    axes.set(xlabel="ms a step")
    plot_style.legend(figure, [axes])
    return figure


def _draw_bar(axes: "Axes", row: int, parts_ms: Mapping[str, float], longest_ms: float) -> None:
    """Draws the parts of a step beside each other.

    Args:
        axes: the panel.
        row: the number of the row.
        parts_ms: milliseconds of each part.
        longest_ms: milliseconds of the longest bar. A part too short for that has no number.
    """
    left = 0.0
    for part, ms in parts_ms.items():
        label, colour, text_colour = STEP_PARTS[part]
        # The legend takes its labels from the first row.
        label_of_row = None if row else label
        axes.barh(row, ms, left=left, height=0.62, color=colour, label=label_of_row)
        if ms > 0.05 * longest_ms:
            middle = left + ms / 2
            number = three_digits(ms)
            axes.text(middle, row, number, ha="center", va="center", color=text_colour, fontsize=8)
        left += ms
    total = f"{three_digits(left)} ms"
    axes.annotate(
        total, (left, row), (6, 0), textcoords="offset points", va="center", weight="bold"
    )


# Loss and accuracy against time


def _learning(comparisons: Sequence[ComparedRuns], notes: list[str]) -> "Figure | None":
    """Draws loss and accuracy, a row of panels for each comparison.

    Returns None if nothing was recorded.

    Args:
        comparisons: the trainings.
        notes: what is missing is added here, a line each.
    """
    shown = []
    for compared in comparisons:
        losses: dict[Kind, list[Line]] = {}
        for kind, runs in compared.by_kind.items():
            losses[kind] = []
            for run in runs:
                steps, missing = run.read_steps()
                losses[kind].append(loss_curve(steps))
                notes += missing
        has_losses = any(seconds for seconds, _ in chain.from_iterable(losses.values()))
        if has_losses or any(run.summary.evaluations for run in compared.runs):
            shown.append((compared, losses))
    if not shown:
        return None
    figure, axes = plot_style.new_figure(0.6 + 2.9 * len(shown), 2, len(shown))
    for (compared, losses), loss, accuracy in zip(shown, axes[::2], axes[1::2], strict=True):
        _draw_training(loss, accuracy, compared, losses)
    plot_style.legend(figure, axes)
    return figure


def _draw_training(
    loss: "Axes", accuracy: "Axes", compared: ComparedRuns, losses: Mapping[Kind, Sequence[Line]]
) -> None:
    """Draws the trainings of a comparison.

    Args:
        loss: the panel of losses.
        accuracy: the panel of accuracies.
        compared: the trainings.
        losses: the loss curve of each training, by kind.
    """
    for kind, runs in compared.by_kind.items():
        look = _line_style(kind, list(compared.by_kind))
        loss.plot(*_with_gaps(losses[kind]), **look)
        accuracies = [_accuracy_curve(run.summary.evaluations) for run in runs]
        _, marker = plot_style.look_of_side(kind.mode, kind.family)
        accuracy.plot(*_with_gaps(accuracies), marker=marker, markersize=3.6, **look)
    target = compared.runs[0].summary.target_accuracy
    if target:
        label = f"target {target:g}"
        accuracy.axhline(target, color=plot_style.INK, linewidth=0.9, linestyle=":", label=label)
    for panel, what in ((loss, "cross-entropy"), (accuracy, "validation accuracy")):
        panel.set(xlabel="seconds of training", ylabel=what, title=compared.title)
        panel.set_xlim(left=0)
        panel.grid(True)
        panel.xaxis.set_major_formatter("{x:,.7g}")
    values: list[float] = []
    for _, line_values in chain.from_iterable(losses.values()):
        values += filter(math.isfinite, line_values)
    if values and max(values) > 10 * min(values) > 0:
        plot_style.log_scale(loss)


def _accuracy_curve(evaluations: Sequence[Evaluation]) -> Line:
    seconds = []
    accuracies = []
    for evaluation in evaluations:
        if evaluation.val_accuracy is not None:
            seconds.append(evaluation.train_s)
            accuracies.append(evaluation.val_accuracy)
    return seconds, accuracies


# Time to the target against local steps


def _local_steps(comparisons: Sequence[ComparedRuns]) -> "Figure | None":
    """Draws the time to the target, a panel for each comparison.

    Returns None if no mode reached the target with two or more numbers of local steps.
    """
    shown = []
    for compared in comparisons:
        times = _times_by_local_steps(compared)
        if any(len(by_local_steps) > 1 for by_local_steps in times.values()):
            shown.append((compared, times))
    if not shown:
        return None
    figure, panels = plot_style.new_figure(0.6 + 2.6 * len(shown), 1, len(shown))
    for (compared, times), axes in zip(shown, panels, strict=True):
        ticks: set[int] = set()
        for kind, by_local_steps in times.items():
            local_steps = sorted(by_local_steps)
            seconds = [by_local_steps[number] for number in local_steps]
            colour, marker = plot_style.look_of_side(kind.mode, kind.family)
            axes.plot(
                local_steps, seconds, color=colour, marker=marker, linewidth=1.0, label=kind.label
            )
            ticks.update(local_steps)
        axes.set_xscale("log")
        axes.set_xticks(sorted(ticks))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:,.0f}")
        plot_style.log_scale(axes)
        axes.set(xlabel="local steps", ylabel="seconds to the target", title=compared.title)
        axes.grid(True)
    plot_style.legend(figure, panels)
    return figure


def _times_by_local_steps(compared: ComparedRuns) -> dict[Kind, dict[int, float]]:
    """Returns the shortest seconds to the target by local steps, of each kind without options."""
    times: dict[Kind, dict[int, float]] = {}
    for kind, runs in compared.by_kind.items():
        seconds = expected_time(runs)["seconds"]
        if seconds is None:
            continue
        by_local_steps = times.setdefault(kind._replace(variant=""), {})
        number = runs[0].local_steps
        by_local_steps[number] = min(seconds, by_local_steps.get(number, seconds))
    return times


def loss_curve(ranks: Mapping[str, Sequence[Step]]) -> Line:
    """Returns the loss of all workers together: seconds of training, and the mean loss there.

    The steps of all workers are sorted by time and cut into at most MAX_POINTS equal windows, none
    smaller than the number of workers. A point is the mean over a window, of losses weighted by
    samples.

    Args:
        ranks: the steps of each worker.
    """
    steps = []
    for step in chain.from_iterable(ranks.values()):
        if step.loss is not None and step.samples > 0:
            steps.append(step)
    steps.sort(key=lambda step: step.time)
    size = max(len(ranks), -(-len(steps) // MAX_POINTS), 1)
    seconds = []
    losses = []
    for start in range(0, len(steps), size):
        window = steps[start : start + size]
        samples = sum(step.samples for step in window)
        loss = sum((step.loss or 0.0) * step.samples for step in window)
        seconds.append(sum(step.time for step in window) / len(window))
        losses.append(loss / samples)
    return seconds, losses


def _line_style(kind: Kind, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Returns how a kind's line looks.

    The colour is the mode's, or that of one machine. Kinds of the same colour differ in their line
    style.
    """
    colour = plot_style.colour(kind)
    alike = [other for other in kinds if plot_style.colour(other) == colour]
    style = plot_style.LINES[alike.index(kind) % len(plot_style.LINES)]
    return {"color": colour, "linestyle": style, "linewidth": 1.0, "label": kind.label}


def _with_gaps(lines: Iterable[Line]) -> Line:
    """Returns lines that look alike as one line with gaps, which is drawn much faster."""
    x: list[float] = []
    y: list[float] = []
    for line_x, line_y in lines:
        x += [*line_x, math.nan]
        y += [value if math.isfinite(value) else math.nan for value in line_y]
        y.append(math.nan)
    return x, y
