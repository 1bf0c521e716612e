"""One file of what all ranks wrote down: nothing lost, on one clock, nested as it was."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.system.trace import APPLY, PULL, PUSH, STEP, UNDER_WAY, flow_of
from hvdtrain.job.recording.trace_file import (
    TRACE,
    RankTrace,
    _in_lanes,
    merge_traces,
    write_rank_trace,
)


def read(run):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    found = Trace()
    found.ParseFromString((run / TRACE).read_bytes())
    return found.packet


def test_ranks_are_processes_and_a_push_flows_to_its_server_and_back_on_one_clock(tmp_path):
    flow = flow_of(7, 0, 0, 3)
    ahead = 100.0  # of the server's clock
    server = RankTrace(
        0,
        "server",
        [(APPLY, "apply", 5.002 + ahead, 5.003 + ahead, flow)],
        [("queue", 5.002 + ahead, 1)],
    )
    worker = RankTrace(
        1,
        "worker",
        [
            (STEP, "backward", 4.9, 5.1, 0),
            (PUSH, "push", 5.0, 5.001, flow),
            (PULL, "pull", 5.004, 5.005, flow),
        ],
        [],
    )
    for part in (server, worker):
        write_rank_trace(tmp_path, part)
    assert merge_traces(tmp_path, {0: ahead, 1: 0.0}) == 4
    assert not (tmp_path / "trace").exists()
    packets = read(tmp_path)
    names = [
        p.track_descriptor.process.process_name
        for p in packets
        if p.track_descriptor.HasField("process")
    ]
    assert names == ["rank 0 (server)", "rank 1 (worker)"]
    slices = {p.track_event.name: p for p in packets if p.track_event.name}
    at = {name: p.timestamp / 1e9 for name, p in slices.items()}
    assert at == pytest.approx(
        {"backward": 0, "push": 0.1, "apply": 0.102, "pull": 0.104}, abs=1e-6
    )
    assert [list(slices[name].track_event.flow_ids) for name in ("push", "apply", "pull")] == [
        [flow]
    ] * 3
    [queue] = [p for p in packets if p.track_event.type == p.track_event.TYPE_COUNTER]
    assert queue.track_event.double_counter_value == 1


MOMENT = st.floats(0, 10, allow_nan=False)


@given(
    st.lists(
        st.tuples(st.sampled_from([PUSH, UNDER_WAY]), st.just("x"), MOMENT, MOMENT, st.just(0))
    )
)
def test_what_overlaps_lies_on_different_tracks(spans):
    spans = [(kind, name, *sorted(moments), flow) for kind, name, *moments, flow in spans]
    placed = _in_lanes(spans)
    assert len(placed) == len(spans)
    for track in {track for track, _ in placed}:
        own = [span for name, span in placed if name == track]
        assert all(one[3] <= two[2] for one, two in pairwise(own))
