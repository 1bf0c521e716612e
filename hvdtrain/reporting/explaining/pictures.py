"""What a report shows of `explain`: who was slow when, and one step across all ranks."""

from collections.abc import Sequence
from contextlib import suppress

from hvdtrain.base.errors import UsageError
from hvdtrain.base.numerics.slowdown import is_uneven
from hvdtrain.job.recording.trace_file import TRACE
from hvdtrain.reporting.comparisons import split_into_comparisons
from hvdtrain.reporting.explaining import heatmap, step_picture
from hvdtrain.reporting.explaining.straggler import find_straggler
from hvdtrain.reporting.explaining.timeline import Timeline, read_timeline
from hvdtrain.reporting.page import Plot
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Run


def pictures(runs: Sequence[Run]) -> list[Plot]:
    """Returns plots for a report, of the first repeat of each kind.

    There is a heatmap of the runs that had a straggler or were made slow by --slow, and a step of
    the runs with a trace.
    """
    slow = {}
    traced = {}
    for compared in split_into_comparisons(runs):
        for kind, members in compared.by_kind.items():
            run = members[0]
            label = compared.label(kind)
            timeline = _timeline_of_slow(run)
            if timeline:
                slow[label] = timeline
            if (run.folder / TRACE).is_file():
                traced[label] = run.folder
    plots = []
    if slow:
        title = "Who was slow, and when"
        plots.append(Plot("ranks", title, heatmap.CAPTION, heatmap.heatmap(slow)))
    if traced:
        # UsageError: less than a whole step was traced.
        with suppress(UsageError):
            figure = step_picture.one_step(traced)
            plots.append(Plot("one-step", "One step", step_picture.CAPTION, figure))
    return plots


def _timeline_of_slow(run: Run) -> Timeline | None:
    """Returns the timeline of a run with a slow worker; None of others and of short runs."""
    try:
        timeline = read_timeline(run)
    except UsageError:
        return None
    is_slow = find_straggler(timeline) or is_uneven(field_value(run, "slow.asked"))
    return timeline if is_slow and len(timeline.ranks) > 1 else None
