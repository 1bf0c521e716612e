"""A picture of one step across all ranks, from the run's trace.

It is for people without Perfetto, and for paper.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.base.config.untrusted import read_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.base.system.trace import APPLY, PULL, PUSH, REDUCE, STEP, STEP_NUMBER, UNDER_WAY
from hvdtrain.job.recording.trace_file import TRACE
from hvdtrain.reporting.plot_style import MUTED, RC, STEP_PARTS, legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MESSAGES = {
    PUSH: "#5f12a0",
    PULL: "#2ba632",
    APPLY: "#84543b",
    UNDER_WAY: "#dfdfe8",
    REDUCE: "#c23b80",
}
# Bytes of a trace that is read.
LARGEST_TRACE = 2**28
ARROWS = "; arrows: a bucket's way to its server and back"
CAPTION = (
    "While one worker took a step, of those that were traced the one of median length: "
    "what all ranks did when. Arrows, where there are servers, follow each bucket to its server "
    "and back. `trace.pftrace` in the run's folder has all of it, for ui.perfetto.dev."
)


class Slice(NamedTuple):
    """One thing that a rank did.

    Attributes:
        process: the name of the rank's process.
        track: the row of Perfetto that the slice is in.
        name: what the rank did.
        began, ended: in seconds of the trace.
        flow: a number that slices of one message share; 0 for none.
    """

    process: str
    track: str
    name: str
    began: float
    ended: float
    flow: int


# When each process began which step: (seconds of the trace, number), by the name of the process.
StepNumbers = dict[str, list[tuple[float, int]]]


def read_slices(run: Path) -> tuple[list[Slice], StepNumbers]:
    """Returns all slices of a traced run, and when steps began.

    Args:
        run: the folder of the run.

    Raises:
        UsageError: the run has no trace, or one that cannot be read.
    """
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    process_names: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    opened: dict[int, list[Any]] = defaultdict(list)
    slices = []
    numbers: StepNumbers = defaultdict(list)
    for packet in sorted(_packets(run), key=lambda packet: packet.timestamp):
        described = packet.track_descriptor
        event = packet.track_event
        moment = packet.timestamp / 1e9
        process, track = tracks.get(event.track_uuid, ("", ""))
        if described.HasField("process"):
            process_names[described.uuid] = described.process.process_name
        elif packet.HasField("track_descriptor"):
            process_name = process_names.get(described.parent_uuid, "")
            tracks[described.uuid] = (process_name, described.name)
        elif event.type == TrackEvent.TYPE_SLICE_BEGIN:
            opened[event.track_uuid].append((moment, event))
        elif event.type == TrackEvent.TYPE_SLICE_END and opened[event.track_uuid]:
            began, opening = opened[event.track_uuid].pop()
            flow = opening.flow_ids[0] if opening.flow_ids else 0
            slices.append(Slice(process, track, opening.name, began, moment, flow))
        elif event.type == TrackEvent.TYPE_COUNTER and track == STEP_NUMBER:
            numbers[process].append((moment, int(event.double_counter_value)))
    return slices, numbers


def _packets(run: Path) -> Sequence[Any]:
    """Returns the packets of a run's trace.

    Raises:
        UsageError: there is no trace, or it cannot be read.
    """
    from google.protobuf.message import DecodeError
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    trace = Trace()
    try:
        trace.ParseFromString(read_whole(run / TRACE, LARGEST_TRACE))
    except FileNotFoundError:
        raise UsageError(f"{run} has no {TRACE}: train with --trace") from None
    except (OSError, DecodeError) as error:
        raise UsageError(f"{run / TRACE} cannot be read: {error}") from None
    return trace.packet


def one_step(runs: Mapping[str, Path]) -> "Figure":
    """Draws a typical step of those that were traced, of each run below each other on one scale.

    Args:
        runs: the folders of the runs, by title.

    Raises:
        UsageError: a run has no trace, or no whole step in it.
    """
    from matplotlib import rc_context

    steps = {title: _typical_step(run) for title, run in runs.items()}
    longest_s = max(step.end - step.begin for step in steps.values())
    heights = [0.8 + 0.24 * len(step.rows) for step in steps.values()]
    with rc_context(RC):
        figure, panels = new_figure(0.4 + sum(heights), rows=len(steps), height_ratios=heights)
        for (title, step), axes in zip(steps.items(), panels, strict=True):
            _draw(step, axes)
            axes.set_xlim(0, 1000 * longest_s)
            axes.set_title(f"{title}: {step.name}", loc="left")
        has_arrows = any(step.has_messages for step in steps.values())
        panels[-1].set_xlabel(f"ms since that step began{ARROWS if has_arrows else ''}")
        legend(figure, panels)
    return figure


class _Step(NamedTuple):
    """What all ranks did while one worker took a step, without the layers of the model.

    Attributes:
        name: which step of which worker.
        begin, end: in seconds of the trace.
        slices: what the ranks did.
        rows: (process, track) of each row, from the top.
    """

    name: str
    begin: float
    end: float
    slices: list[Slice]
    rows: list[tuple[str, str]]

    @property
    def has_messages(self) -> bool:
        return any(slice_.flow for slice_ in self.slices)

    def place(self, slice_: Slice, moment: float) -> tuple[float, int]:
        """Returns milliseconds since the step began, and the row of a slice."""
        return 1000 * (moment - self.begin), self.rows.index((slice_.process, slice_.track))


def _typical_step(run: Path) -> _Step:
    """Returns the step of median length of those that the first worker traced, with what it waited.

    Raises:
        UsageError: there is no trace, or no whole step in it.
    """
    slices, numbers = read_slices(run)
    worker = min(numbers, key=_natural, default="")
    begins = numbers[worker]
    if len(begins) < 2:
        raise UsageError(f"{run / TRACE} holds no whole step: trace two or more")
    steps = [(end - begin, begin, end, number) for (begin, number), (end, _) in pairwise(begins)]
    _, begin, end, number = sorted(steps)[(len(steps) - 1) // 2]
    drawn = []
    for slice_ in slices:
        is_meanwhile = slice_.ended > begin and slice_.began < end
        is_layer = slice_.track == STEP and slice_.name not in STEP_PARTS
        if is_meanwhile and not is_layer:
            drawn.append(slice_)
    rows = sorted({(slice_.process, slice_.track) for slice_ in drawn}, key=_row_order)
    worker_name, _, _ = worker.partition(" (")
    return _Step(f"step {number} of {worker_name}", begin, end, drawn, rows)


def _row_order(row: tuple[str, str]) -> tuple[Any, ...]:
    """Returns the place of a (process, track) among others: the track of steps comes first."""
    process, track = row
    return _natural(process), track != STEP, _natural(track)


def _draw(step: _Step, axes: "Axes") -> None:
    """Draws a step."""
    # The longest slices first, so that others stand on them.
    for slice_ in sorted(step.slices, key=lambda slice_: slice_.began - slice_.ended):
        kind = slice_.track.rstrip("0123456789 ")
        if slice_.name in STEP_PARTS:
            label, colour, _ = STEP_PARTS[slice_.name]
        else:
            label = kind
            colour = MESSAGES.get(kind, "#00000033")
        left, row = step.place(slice_, max(slice_.began, step.begin))
        right, _ = step.place(slice_, min(slice_.ended, step.end))
        axes.barh(
            row, right - left, left=left, linewidth=0.4, color=colour, edgecolor=colour, label=label
        )
    _draw_arrows(step, axes)
    labels = [f"{process}: {track}" for process, track in step.rows]
    axes.set_yticks(range(len(step.rows)), labels, fontsize=8)
    axes.invert_yaxis()


def _draw_arrows(step: _Step, axes: "Axes") -> None:
    """Draws the way of each message, from one of its slices to the next."""
    from matplotlib.patches import FancyArrowPatch

    messages = [slice_ for slice_ in step.slices if slice_.flow]
    messages.sort(key=lambda slice_: (slice_.flow, slice_.began))
    for slice_, following in pairwise(messages):
        if slice_.flow != following.flow:
            continue
        arrow = FancyArrowPatch(
            step.place(slice_, slice_.ended),
            step.place(following, following.began),
            arrowstyle="->",
            mutation_scale=7,
            color=MUTED,
            linewidth=0.5,
            shrinkA=0,
            shrinkB=0,
        )
        axes.add_patch(arrow)


def _natural(name: str) -> list[str | int]:
    """Returns a key to sort names by that puts rank 10 behind rank 2."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d{1,9})", name)]
