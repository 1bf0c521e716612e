"""A worker's pushes in the timeline of --trace. What servers count is in server_metrics.py."""

import time
from typing import TYPE_CHECKING, Any

from hvdtrain.system import trace

if TYPE_CHECKING:
    from hvdtrain.ps.exchange import PushLane

SHORTEST_S = 5e-5  # of waits for weights: most layers' are there


class PushTrace:
    """Writes the pushes of recorded steps, and waits in them, to the timeline of --trace.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def sent(self, lane: "PushLane", under_way: int) -> None:
        """A push has been sent; so many bytes are under way with it."""
        name = f"push bucket {lane.piece.number} to server {lane.piece.server}"
        self._write(trace.PUSH, name, lane, lane.sent_at, under_way)

    def answered(self, lane: "PushLane", came: float, under_way: int) -> None:
        """A push's answer came then, and its weights are in the model."""
        name = f"pull bucket {lane.piece.number} from server {lane.piece.server}"
        if self._write(trace.PULL, name, lane, came, under_way):
            trace.span(trace.UNDER_WAY, f"bucket {lane.number}", lane.sent_at, came)
            trace.count("staleness", lane.context.status.staleness)

    def waited(self, began: Any, ended: Any) -> None:
        """Forward waited for weights; on a GPU the moments are events, which nobody waits for here."""
        if trace.is_recording() and isinstance(began, float) and ended - began > SHORTEST_S:
            trace.span(trace.STEP, "comm", began, ended)

    def _write(self, track: str, name: str, lane: "PushLane", began: float, under_way: int) -> bool:
        if not trace.records(lane.push.step_of_job(self.workers)):
            return False
        flow = trace.flow_of(lane.push.step, lane.push.worker, lane.piece.server, lane.piece.number)
        trace.span(track, name, began, time.perf_counter(), flow)
        trace.count("bytes under way", under_way)
        return True
