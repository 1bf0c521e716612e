"""A picture of one step across all ranks, from the run's trace: for people without Perfetto, and for paper."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UsageError
from hvdtrain.plot_style import RC, STEP_PARTS, new_figure
from hvdtrain.runs.trace_file import TRACE
from hvdtrain.world.trace import APPLY, PULL, PUSH, REDUCE, STEP, UNDER_WAY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MESSAGES = {PUSH: "#7b5ea7", PULL: "#5fa796", APPLY: "#cb7811", UNDER_WAY: "#d5d9e0", REDUCE: "#7b5ea7"}


@dataclass(frozen=True)
class Slice:
    """One thing that a rank did, in seconds of the trace."""

    process: str
    track: str
    name: str
    began: float
    ended: float
    flow: int


def read_slices(run: Path) -> list[Slice]:
    """All slices of a traced run. UsageError where it has no trace, or one that cannot be read."""
    from google.protobuf.message import DecodeError
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    trace = Trace()
    try:
        trace.ParseFromString((run / TRACE).read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{run} has no {TRACE}: train with --trace") from None
    except (OSError, DecodeError) as error:
        raise UsageError(f"{run / TRACE} cannot be read: {error}") from None
    processes: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    opened: dict[int, list[Any]] = defaultdict(list)
    found = []
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
    return found


CAPTION = (
    "One step, from the middle of those that were traced, across all ranks: what each did when, and each bucket's way "
    "to its server and back. `trace.pftrace` in the run's folder has all of it, for ui.perfetto.dev."
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
            legend = step.draw(axes) | legend
            axes.set_title(title, loc="left")
        panels[-1].set_xlabel("ms of one step; arrows: a bucket's way to its server and back")
        figure.legend(
            list(legend.values()), list(legend), loc="outside upper center", ncols=6, fontsize=8, frameon=False
        )
    return figure


class _Step:
    """What all ranks did in one step.

    Attributes:
        rows: (process, track), from the top.
    """

    def __init__(self, run: Path) -> None:
        slices = read_slices(run)
        self.begin, self.end = _middle_step(slices, run)
        self.slices = [s for s in slices if s.ended > self.begin and s.began < self.end]
        rows = {(s.process, s.track) for s in self.slices}
        self.rows = sorted(rows, key=lambda row: (row[0], row[1] != STEP, row[1]))

    def draw(self, axes: "Axes") -> dict[str, Any]:
        """Draw it, and return what a legend has of it, by label."""
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
                axes.annotate(
                    "", (1000 * (two.began - begin), position[two.process, two.track]),
                    (1000 * (one.ended - begin), position[one.process, one.track]),
                    arrowprops={"arrowstyle": "->", "color": "#5a6474", "lw": 0.5, "shrinkA": 0, "shrinkB": 0},
                )  # fmt: skip
        axes.set_yticks(range(len(self.rows)), [f"{process}: {track}" for process, track in self.rows], fontsize=8)
        axes.set_xlim(0, 1000 * (end - begin))
        axes.invert_yaxis()
        return legend


def _middle_step(slices: list[Slice], run: Path) -> tuple[float, float]:
    """When the middle one of the first worker's steps began and ended."""
    workers = sorted({s.process for s in slices if s.name == "forward"})
    begins = sorted(s.began for s in slices if workers and s.process == workers[0] and s.name == "forward")
    if len(begins) < 2:
        raise UsageError(f"{run / TRACE} holds no whole step: trace two or more")
    middle = (len(begins) - 1) // 2
    return begins[middle], begins[middle + 1]
