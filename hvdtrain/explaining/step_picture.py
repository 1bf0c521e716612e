"""A picture of one step across all ranks, from the run's trace: for people without Perfetto, and for paper."""

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.config.untrusted import read_whole
from hvdtrain.errors import UsageError
from hvdtrain.plot_style import MUTED, RC, STEP_PARTS, legend, new_figure
from hvdtrain.runs.trace_file import TRACE
from hvdtrain.system.trace import APPLY, PULL, PUSH, REDUCE, STEP, STEP_NUMBER, UNDER_WAY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MESSAGES = {PUSH: "#5f12a0", PULL: "#2ba632", APPLY: "#84543b", UNDER_WAY: "#dfdfe8", REDUCE: "#c23b80"}
ARROWS = "; arrows: a bucket's way to its server and back"


class Slice(NamedTuple):
    """One thing that a rank did, in seconds of the trace."""

    process: str
    track: str
    name: str
    began: float
    ended: float
    flow: int


StepNumbers = dict[str, list[tuple[float, int]]]  # by process, when it began which step


def read_slices(run: Path) -> tuple[list[Slice], StepNumbers]:
    """All slices of a traced run, and when steps began.

    Raises:
        UsageError: it has no trace, or one that cannot be read.
    """
    from google.protobuf.message import DecodeError
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    trace = Trace()
    try:
        trace.ParseFromString(read_whole(run / TRACE))
    except FileNotFoundError:
        raise UsageError(f"{run} has no {TRACE}: train with --trace") from None
    except (OSError, DecodeError) as error:
        raise UsageError(f"{run / TRACE} cannot be read: {error}") from None
    names: dict[int, str] = {}  # of processes
    tracks: dict[int, tuple[str, str]] = {}
    opened: dict[int, list[Any]] = defaultdict(list)
    slices = []
    numbers: StepNumbers = defaultdict(list)
    for packet in sorted(trace.packet, key=lambda packet: packet.timestamp):
        described, event, moment = packet.track_descriptor, packet.track_event, packet.timestamp / 1e9
        process, track = tracks.get(event.track_uuid, ("", ""))
        if described.HasField("process"):
            names[described.uuid] = described.process.process_name
        elif packet.HasField("track_descriptor"):
            tracks[described.uuid] = (names.get(described.parent_uuid, ""), described.name)
        elif event.type == TrackEvent.TYPE_SLICE_BEGIN:
            opened[event.track_uuid].append((moment, event))
        elif event.type == TrackEvent.TYPE_SLICE_END and opened[event.track_uuid]:
            began, first = opened[event.track_uuid].pop()
            slices.append(Slice(process, track, first.name, began, moment, next(iter(first.flow_ids), 0)))
        elif event.type == TrackEvent.TYPE_COUNTER and track == STEP_NUMBER:
            numbers[process].append((moment, int(event.double_counter_value)))
    return slices, numbers


CAPTION = (
    "While one worker took a step, from the middle of those that were traced: what all ranks did when. Arrows, where "
    "there are servers, follow each bucket to its server and back. `trace.pftrace` in the run's folder has all of it, "
    "for ui.perfetto.dev."
)


def one_step(runs: Mapping[str, Path]) -> "Figure":
    """A picture of the step in the middle of those that were traced, of each run, by title, below each other.

    Raises:
        UsageError: a run has no trace, or no whole step in it.
    """
    from matplotlib import rc_context

    steps = {title: _middle_step(run) for title, run in runs.items()}
    heights = [0.8 + 0.24 * len(step.rows) for step in steps.values()]
    with rc_context(RC):
        figure, panels = new_figure(0.4 + sum(heights), rows=len(steps), height_ratios=heights)
        for (title, step), axes in zip(steps.items(), panels, strict=True):
            _draw(step, axes)
            axes.set_title(f"{title}: {step.name}", loc="left")
        has_arrows = any(s.flow for step in steps.values() for s in step.slices)
        panels[-1].set_xlabel(f"ms since that step began{ARROWS if has_arrows else ''}")
        legend(figure, panels)
    return figure


class _Step(NamedTuple):
    """What all ranks did while one worker took a step, but for the layers of its model.

    Attributes:
        name: which step of which worker.
        begin, end: in seconds of the trace.
        rows: (process, track), from the top.
    """

    name: str
    begin: float
    end: float
    slices: list[Slice]
    rows: list[tuple[str, str]]


def _middle_step(run: Path) -> _Step:
    slices, numbers = read_slices(run)
    worker = min(numbers, key=_natural, default="")
    begins = numbers[worker]
    if len(begins) < 2:
        raise UsageError(f"{run / TRACE} holds no whole step: trace two or more")
    middle = (len(begins) - 1) // 2
    (begin, number), (end, _) = begins[middle], begins[middle + 1]
    drawn = [s for s in slices if s.ended > begin and s.began < end and (s.track != STEP or s.name in STEP_PARTS)]
    rows = sorted(
        {(s.process, s.track) for s in drawn}, key=lambda row: (_natural(row[0]), row[1] != STEP, _natural(row[1]))
    )
    return _Step(f"step {number} of {worker.partition(' (')[0]}", begin, end, drawn, rows)


def _draw(step: _Step, axes: "Axes") -> None:
    from matplotlib.patches import FancyArrowPatch

    def place(s: Slice, moment: float) -> tuple[float, int]:
        """Milliseconds since the step began, and the row."""
        return 1000 * (moment - step.begin), step.rows.index((s.process, s.track))

    for s in sorted(step.slices, key=lambda s: s.began - s.ended):  # the longest first, others on it
        kind = s.track.rstrip("0123456789 ")
        label, colour, *_ = STEP_PARTS.get(s.name, (kind, MESSAGES.get(kind, "#00000033")))
        left, row = place(s, max(s.began, step.begin))
        right, _ = place(s, min(s.ended, step.end))
        axes.barh(row, right - left, left=left, linewidth=0.4, color=colour, edgecolor=colour, label=label)
    messages = sorted((s for s in step.slices if s.flow), key=lambda s: (s.flow, s.began))
    for one, two in pairwise(messages):
        if one.flow == two.flow:
            axes.add_patch(FancyArrowPatch(
                place(one, one.ended), place(two, two.began), arrowstyle="->", mutation_scale=7, color=MUTED,
                linewidth=0.5, shrinkA=0, shrinkB=0,
            ))  # fmt: skip
    axes.set_yticks(range(len(step.rows)), [f"{process}: {track}" for process, track in step.rows], fontsize=8)
    axes.set_xlim(0, 1000 * (step.end - step.begin))
    axes.invert_yaxis()


def _natural(name: str) -> list[str | int]:
    """Sorts rank 10 behind rank 2."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
