"""A picture of one step across all ranks, from the run's trace: for people without Perfetto, and for paper."""

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.untrusted import read_file
from hvdtrain.errors import UsageError
from hvdtrain.plot_style import MUTED, RC, STEP_PARTS, new_figure
from hvdtrain.runs.trace_file import TRACE
from hvdtrain.system.trace import APPLY, PULL, PUSH, REDUCE, STEP, STEP_NUMBER, UNDER_WAY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MESSAGES = {PUSH: "#5f12a0", PULL: "#2ba632", APPLY: "#84543b", UNDER_WAY: "#dfdfe8", REDUCE: "#c23b80"}
ARROWS = "; arrows: a bucket's way to its server and back"


@dataclass(frozen=True)
class Slice:
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
        trace.ParseFromString(read_file(run / TRACE))
    except FileNotFoundError:
        raise UsageError(f"{run} has no {TRACE}: train with --trace") from None
    except (OSError, DecodeError) as error:
        raise UsageError(f"{run / TRACE} cannot be read: {error}") from None
    processes: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    opened: dict[int, list[Any]] = defaultdict(list)
    found = []
    numbers: StepNumbers = defaultdict(list)
    for packet in sorted(trace.packet, key=lambda packet: packet.timestamp):
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            if described.HasField("process"):
                processes[described.uuid] = described.process.process_name
            else:
                tracks[described.uuid] = (processes.get(described.parent_uuid, ""), described.name)
            continue
        event = packet.track_event
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            opened[event.track_uuid].append((packet.timestamp / 1e9, event))
        elif event.type == TrackEvent.TYPE_SLICE_END and opened[event.track_uuid]:
            began, first = opened[event.track_uuid].pop()
            process, track = tracks.get(event.track_uuid, ("", ""))
            flow = first.flow_ids[0] if first.flow_ids else 0
            found.append(Slice(process, track, first.name, began, packet.timestamp / 1e9, flow))
        elif event.type == TrackEvent.TYPE_COUNTER:
            process, track = tracks.get(event.track_uuid, ("", ""))
            if track == STEP_NUMBER:
                numbers[process].append((packet.timestamp / 1e9, int(event.double_counter_value)))
    return found, numbers


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

    steps = {title: _Step(run) for title, run in runs.items()}
    heights = [0.8 + 0.24 * len(step.rows) for step in steps.values()]
    legend: dict[str, Any] = {}
    with rc_context(RC):
        figure, panels = new_figure(0.4 + sum(heights), rows=len(steps), height_ratios=heights)
        for (title, step), axes in zip(steps.items(), panels, strict=True):
            legend |= step.draw(axes)
            axes.set_title(": ".join(filter(None, [title, step.name])), loc="left")
        has_arrows = any(step.has_flows for step in steps.values())
        panels[-1].set_xlabel(f"ms since that step began{ARROWS if has_arrows else ''}")
        in_order = [label for label, *_ in STEP_PARTS.values() if label in legend]
        in_order += [label for label in legend if label not in in_order]
        figure.legend(
            [legend[label] for label in in_order], in_order, loc="outside upper center", ncols=6, fontsize=8,
            frameon=False,
        )  # fmt: skip
    return figure


class _Step:
    """What all ranks did while one worker took a step.

    Attributes:
        name: which step of which worker; empty where the trace does not tell.
        rows: (process, track), from the top.
        has_flows: whether messages to servers were traced.
    """

    def __init__(self, run: Path) -> None:
        slices, numbers = read_slices(run)
        self.begin, self.end, self.name = _middle_step(slices, numbers, run)
        self.slices = [s for s in slices if s.ended > self.begin and s.began < self.end]
        rows = {(s.process, s.track) for s in self.slices}
        self.rows = sorted(rows, key=lambda row: (_natural(row[0]), row[1] != STEP, _natural(row[1])))
        self.has_flows = any(s.flow for s in self.slices)

    def draw(self, axes: "Axes") -> dict[str, Any]:
        """Draw it, and return what a legend has of it, by label."""
        from matplotlib.patches import FancyArrowPatch

        begin, end = self.begin, self.end
        position = {row: number for number, row in enumerate(self.rows)}
        legend: dict[str, Any] = {}
        for s in sorted(self.slices, key=lambda s: s.began - s.ended):  # the longest first, its parts on it
            began, ended = max(s.began, begin), min(s.ended, end)
            kind = s.track.rstrip("0123456789 ")
            label, colour, *_ = STEP_PARTS.get(s.name, (kind, MESSAGES.get(kind, "#00000033")))
            is_layer = s.track == STEP and s.name not in STEP_PARTS
            bar = axes.barh(
                position[s.process, s.track], 1000 * (ended - began), left=1000 * (began - begin), linewidth=0.4,
                height=0.5 if is_layer else 0.8, color="none" if is_layer else colour,
                edgecolor="#ffffff" if is_layer else colour,
            )  # fmt: skip
            if not is_layer:
                legend.setdefault(label, bar)
        by_flow = defaultdict(list)
        for s in self.slices:
            if s.flow:
                by_flow[s.flow].append(s)
        for flow in by_flow.values():
            for one, two in pairwise(sorted(flow, key=lambda s: s.began)):
                axes.add_patch(FancyArrowPatch(
                    (1000 * (one.ended - begin), position[one.process, one.track]),
                    (1000 * (two.began - begin), position[two.process, two.track]),
                    arrowstyle="->", mutation_scale=7, color=MUTED, linewidth=0.5, shrinkA=0, shrinkB=0,
                ))  # fmt: skip
        axes.set_yticks(range(len(self.rows)), [f"{process}: {track}" for process, track in self.rows], fontsize=8)
        axes.set_xlim(0, 1000 * (end - begin))
        axes.invert_yaxis()
        return legend


def _middle_step(slices: list[Slice], numbers: StepNumbers, run: Path) -> tuple[float, float, str]:
    """When the middle one of the first worker's steps began and ended, and which it is."""
    worker = min((s.process for s in slices if s.name == "forward"), key=_natural, default="")
    begins = sorted(s.began for s in slices if s.process == worker and s.name == "forward")
    counted = numbers.get(worker, [])
    firsts = {bisect_right(counted, (began, math.inf)): began for began in reversed(begins)}
    begins = sorted(firsts.values())  # of a step with several forward passes, the first
    if len(begins) < 2:
        raise UsageError(f"{run / TRACE} holds no whole step: trace two or more")
    middle = (len(begins) - 1) // 2
    at = bisect_right(counted, (begins[middle], math.inf))
    name = f"step {counted[at - 1][1]} of {worker.partition(' (')[0]}" if at else ""
    return begins[middle], begins[middle + 1], name


def _natural(name: str) -> list[str | int]:
    """Sorts rank 10 behind rank 2."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
