"""What a report shows of `explain`, where it says something: who was slow when, and one step across all ranks."""

from collections.abc import Sequence
from contextlib import suppress

from hvdtrain.errors import UsageError
from hvdtrain.explaining import heatmap, step_picture
from hvdtrain.explaining.straggler import find_straggler
from hvdtrain.explaining.timeline import Timeline, read_timeline
from hvdtrain.numerics.slowdown import is_uneven
from hvdtrain.report.comparisons import split_into_comparisons
from hvdtrain.report.page import Plot
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run
from hvdtrain.runs.trace_file import TRACE


def pictures(runs: Sequence[Run]) -> list[Plot]:
    """Plots for a report, of the first repeat of each kind: a heatmap of those that had a straggler or were run with
    --slow, and a step of those with a trace.
    """
    comparisons = split_into_comparisons(runs)
    first = {one.label(kind): members[0] for one in comparisons for kind, members in one.by_kind.items()}
    drawn = []
    if slow := {label: timeline for label, run in first.items() if (timeline := _timeline_of_slow(run))}:
        drawn.append(Plot("ranks", "Who was slow, and when", heatmap.CAPTION, heatmap.heatmap(slow)))
    if traced := {label: run.folder for label, run in first.items() if (run.folder / TRACE).is_file()}:
        with suppress(UsageError):  # less than a whole step was traced
            drawn.append(Plot("one-step", "One step", step_picture.CAPTION, step_picture.one_step(traced)))
    return drawn


def _timeline_of_slow(run: Run) -> Timeline | None:
    try:
        timeline = read_timeline(run)
    except UsageError:  # too short
        return None
    is_slow = find_straggler(timeline) or is_uneven(field_value(run, "slow.asked"))
    return timeline if is_slow and len(timeline.ranks) > 1 else None
