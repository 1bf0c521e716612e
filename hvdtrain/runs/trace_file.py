"""The trace of a run: what each rank wrote down, put together as one file that the Perfetto UI opens.

Each rank leaves `trace/rank{r}.json`; when all have, the first worker makes `trace.pftrace` of them (Perfetto's
TracePacket protobuf, https://perfetto.dev/docs/reference/synthetic-track-event).
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from hvdtrain.system.trace import STEP, Count, Span

TRACE = "trace.pftrace"
SEQUENCE = 1  # one writer
NANOSECONDS = 1e9


class RankTrace(msgspec.Struct):
    """What one rank wrote down, in seconds of its own clock."""

    rank: int
    role: str
    spans: list[Span]
    counts: list[Count]


def write_rank_trace(run: Path, recorded: RankTrace) -> None:
    """Leave what a rank has recorded in the run folder."""
    (run / "trace").mkdir(exist_ok=True)
    (run / "trace" / f"rank{recorded.rank}.json").write_bytes(msgspec.json.encode(recorded))


def merge_traces(run: Path, offsets_s: Mapping[int, float]) -> int:
    """Make one trace of those of all ranks, and remove these. Where they recorded nothing, as after the steps that were
    asked for, the trace of an earlier start of the run stays.

    Args:
        offsets_s: by rank, how far its clock is ahead of the first worker's.

    Returns:
        How many spans there are.
    """
    parts = [
        msgspec.json.decode(path.read_bytes(), type=RankTrace) for path in sorted((run / "trace").glob("rank*.json"))
    ]
    spans = sum(len(part.spans) for part in parts)
    if spans or not (run / TRACE).exists():
        write_trace(run / TRACE, parts, offsets_s)
    shutil.rmtree(run / "trace")
    return spans


def write_trace(path: Path, parts: Sequence[RankTrace], offsets_s: Mapping[int, float]) -> None:
    """Write one trace of these ranks, whole or not at all. As merge_traces."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    begins = [span[2] - offsets_s.get(part.rank, 0.0) for part in parts for span in part.spans]
    zero = min(begins, default=0.0)  # the trace begins at 0
    trace = Trace()
    for part in sorted(parts, key=lambda part: part.rank):
        _add_rank(trace, part, zero + offsets_s.get(part.rank, 0.0))
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_bytes(trace.SerializeToString())
    unfinished.replace(path)


def _add_rank(trace, part: RankTrace, zero: float) -> None:  # type: ignore[no-untyped-def]  # Trace: made at run time
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    base = (part.rank + 1) << 20
    process = trace.packet.add().track_descriptor
    process.uuid = base
    process.process.pid = part.rank + 1
    process.process.process_name = f"rank {part.rank} ({part.role})"
    tracks: dict[str, int] = {}

    def track(name: str, is_counter: bool = False) -> int:
        if name not in tracks:
            tracks[name] = base + 1 + len(tracks)
            descriptor = trace.packet.add().track_descriptor
            descriptor.uuid, descriptor.parent_uuid, descriptor.name = tracks[name], base, name
            if is_counter:
                descriptor.counter.SetInParent()
        return tracks[name]

    def event(moment: float, kind: int, uuid: int):  # type: ignore[no-untyped-def]
        packet = trace.packet.add()
        packet.timestamp = max(0, round((moment - zero) * NANOSECONDS))
        packet.trusted_packet_sequence_id = SEQUENCE
        packet.track_event.type, packet.track_event.track_uuid = kind, uuid
        return packet.track_event

    for name, (_, label, began, ended, flow) in _in_lanes(part.spans):
        slice_begin = event(began, TrackEvent.TYPE_SLICE_BEGIN, track(name))
        slice_begin.name = label
        if flow:
            slice_begin.flow_ids.append(flow)
        event(ended, TrackEvent.TYPE_SLICE_END, track(name))
    for name, moment, value in part.counts:
        event(moment, TrackEvent.TYPE_COUNTER, track(name, is_counter=True)).double_counter_value = value


def _in_lanes(spans: Iterable[Span]) -> list[tuple[str, Span]]:
    """Each span with the name of a track on which none overlaps it, but for what a step consists of, which nests.

    Sorted so that slices begin and end in the order in which a track's stack has them.
    """
    placed: list[tuple[str, Span]] = []
    free_at: dict[str, list[float]] = {}
    for span in sorted(spans, key=lambda span: (span[2], -span[3])):
        kind, _, began, ended, _ = span
        if kind == STEP:
            placed.append((kind, span))
            continue
        lanes = free_at.setdefault(kind, [])
        lane = next((i for i, free in enumerate(lanes) if free <= began), len(lanes))
        lanes[lane : lane + 1] = [ended]
        placed.append((f"{kind} {lane + 1}" if lane else kind, span))
    return placed
