"""A picture of one step across all ranks, from the run's trace: for people without Perfetto, and for paper."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.report.style import RC, STEP_PARTS, new_figure
from hvdtrain.runs.trace_file import TRACE

MESSAGES = {"push": "#7b5ea7", "pull": "#5fa796", "apply": "#cb7811", "under way": "#d5d9e0"}


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


def draw_step(run: Path, path: Path) -> None:
    """Write a picture, PNG, SVG or PDF by the name, of the step in the middle of those that were traced.

    Raises:
        UsageError: there is no trace, or no whole step in it.
        OSError: it cannot be written.
    """
    from matplotlib import rc_context

    slices = read_slices(run)
    begin, end = _middle_step(slices, run)
    shown = [s for s in slices if s.ended > begin and s.began < end]
    rows = sorted({(s.process, s.track) for s in shown}, key=lambda row: (row[0], row[1] != "step", row[1]))
    position = {row: number for number, row in enumerate(rows)}
    with rc_context(RC):
        figure, (axes,) = new_figure(1.0 + 0.24 * len(rows))
        legend: dict[str, Any] = {}
        for s in sorted(shown, key=lambda s: s.began - s.ended):  # the longest first, what they consist of on them
            began, ended = max(s.began, begin), min(s.ended, end)
            kind = s.track.rstrip("0123456789 ")
            label, colour, *_ = STEP_PARTS.get(s.name, (kind, MESSAGES.get(kind, "#00000033")))
            is_layer = s.track == "step" and s.name not in STEP_PARTS
            bar = axes.barh(
                position[s.process, s.track], 1000 * (ended - began), left=1000 * (began - begin), linewidth=0.4,
                height=0.5 if is_layer else 0.8, color="none" if is_layer else colour,
                edgecolor="#ffffff" if is_layer else colour,
            )  # fmt: skip
            if not is_layer:
                legend.setdefault(label, bar)
        by_flow = defaultdict(list)
        for s in shown:
            if s.flow:
                by_flow[s.flow].append(s)
        for flow in by_flow.values():
            ordered = sorted(flow, key=lambda s: s.began)
            for one, two in pairwise(ordered):
                axes.annotate(
                    "", (1000 * (two.began - begin), position[two.process, two.track]),
                    (1000 * (one.ended - begin), position[one.process, one.track]),
                    arrowprops={"arrowstyle": "->", "color": "#5a6474", "lw": 0.5, "shrinkA": 0, "shrinkB": 0},
                )  # fmt: skip
        axes.set_yticks(range(len(rows)), [f"{process}: {track}" for process, track in rows], fontsize=8)
        axes.set_xlim(0, 1000 * (end - begin))
        axes.invert_yaxis()
        axes.set_xlabel("ms of one step; arrows: a bucket's way to its server and back")
        figure.legend(
            list(legend.values()), list(legend), loc="outside upper center", ncols=6, fontsize=8, frameon=False
        )
        figure.savefig(path, dpi=150)


def _middle_step(slices: list[Slice], run: Path) -> tuple[float, float]:
    """When the middle one of the first worker's steps began and ended."""
    workers = sorted({s.process for s in slices if s.name == "forward"})
    begins = sorted(s.began for s in slices if workers and s.process == workers[0] and s.name == "forward")
    if len(begins) < 2:
        raise UsageError(f"{run / TRACE} holds no whole step: trace two or more")
    middle = (len(begins) - 1) // 2
    return begins[middle], begins[middle + 1]
