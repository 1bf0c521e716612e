"""The trace of a run: one file, for the Perfetto UI, of what all ranks have recorded.

Each rank writes `trace/rank{r}.json`. When all have, the worker that leads merges these files into
`trace.pftrace` (Perfetto's TracePacket protobuf,
https://perfetto.dev/docs/reference/synthetic-track-event).
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.system.trace import STEP, Count, Span

TRACE = "trace.pftrace"
SEQUENCE = 1  # the id of the only writer of packets
NANOSECONDS = 1e9


class RankTrace(msgspec.Struct):
    """What one rank has recorded, in seconds of the rank's clock."""

    rank: int
    role: str
    spans: list[Span]
    counts: list[Count]


def write_rank_trace(run: Path, recorded: RankTrace) -> None:
    """Writes what a rank has recorded into the run folder."""
    (run / "trace").mkdir(exist_ok=True)
    (run / "trace" / f"rank{recorded.rank}.json").write_bytes(msgspec.json.encode(recorded))


def merge_traces(run: Path, offsets_s: Mapping[int, float]) -> int:
    """Merges the traces of all ranks into one file, and removes them.

    If they have no spans, the trace of an earlier start of the run stays. That is so if the run
    went on after the steps to be traced.

    Args:
        run: the run folder.
        offsets_s: how many seconds each rank's clock is ahead of the first worker's, by rank.

    Returns:
        The number of spans.
    """
    parts = [
        msgspec.json.decode(path.read_bytes(), type=RankTrace)
        for path in sorted((run / "trace").glob("rank*.json"))
    ]
    spans = sum(len(part.spans) for part in parts)
    if spans or not (run / TRACE).exists():
        write_trace(run / TRACE, parts, offsets_s)
    shutil.rmtree(run / "trace")
    return spans


def write_trace(path: Path, parts: Sequence[RankTrace], offsets_s: Mapping[int, float]) -> None:
    """Writes one trace of the ranks, whole or not at all: see merge_traces."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    first_begins = []
    for part in parts:
        offset_s = offsets_s.get(part.rank, 0.0)
        first_begins += [began - offset_s for _, _, began, _, _ in part.spans]
    zero = min(first_begins, default=0.0)  # the trace begins at 0
    trace = Trace()
    for part in sorted(parts, key=lambda part: part.rank):
        _add_rank(trace, part, zero + offsets_s.get(part.rank, 0.0))
    write_whole(path, trace.SerializeToString())


# Trace, a class that protobuf makes at run time, has no type.
def _add_rank(trace, part: RankTrace, zero: float) -> None:  # type: ignore[no-untyped-def]
    """Adds a rank to a trace, as a process with a track for each kind of span.

    Args:
        trace: the trace.
        part: what the rank has recorded.
        zero: the moment at which the trace begins, by the rank's clock.
    """
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    base = (part.rank + 1) << 20
    process = trace.packet.add().track_descriptor
    process.uuid = base
    process.process.pid = part.rank + 1
    process.process.process_name = f"rank {part.rank} ({part.role})"
    tracks: dict[str, int] = {}

    def track(name: str, is_counter: bool = False) -> int:
        """Returns the track of this name, which is added when it is first needed."""
        if name not in tracks:
            tracks[name] = base + 1 + len(tracks)
            descriptor = trace.packet.add().track_descriptor
            descriptor.uuid = tracks[name]
            descriptor.parent_uuid = base
            descriptor.name = name
            if is_counter:
                descriptor.counter.SetInParent()
        return tracks[name]

    def event(moment: float, kind: int, uuid: int):  # type: ignore[no-untyped-def]
        """Adds an event to a track, and returns it."""
        packet = trace.packet.add()
        packet.timestamp = max(0, round((moment - zero) * NANOSECONDS))
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.track_event.type = kind
        packet.track_event.track_uuid = uuid
        return packet.track_event

    for name, (_, label, began, ended, flow) in _in_lanes(part.spans):
        slice_begin = event(began, TrackEvent.TYPE_SLICE_BEGIN, track(name))
        slice_begin.name = label
        if flow:
            slice_begin.flow_ids.append(flow)
        event(ended, TrackEvent.TYPE_SLICE_END, track(name))
    for name, moment, value in part.counts:
        counted = event(moment, TrackEvent.TYPE_COUNTER, track(name, is_counter=True))
        counted.double_counter_value = value


def _in_lanes(spans: Iterable[Span]) -> list[tuple[str, Span]]:
    """Returns each span with the name of its track.

    No two spans of a track overlap, except for the parts of a step, which nest. The spans are
    sorted, so that slices begin and end in the order of a track's stack.
    """
    placed: list[tuple[str, Span]] = []
    free_at: dict[str, list[float]] = {}
    for span in sorted(spans, key=lambda span: (span[2], -span[3])):
        kind, _, began, ended, _ = span
        if kind == STEP:
            placed.append((kind, span))
            continue
        lanes = free_at.setdefault(kind, [])
        free_lanes = (number for number, free_from in enumerate(lanes) if free_from <= began)
        lane = next(free_lanes, len(lanes))
        lanes[lane : lane + 1] = [ended]
        track = f"{kind} {lane + 1}" if lane else kind
        placed.append((track, span))
    return placed
