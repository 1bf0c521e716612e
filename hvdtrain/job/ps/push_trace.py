"""A worker's pushes in the timeline of --trace. Servers' counts are in server_metrics.py."""

import time
from typing import TYPE_CHECKING

from hvdtrain.base.system import trace

if TYPE_CHECKING:
    from hvdtrain.job.ps.push_exchange import PushLane


class PushTrace:
    """Writes the pushes of recorded steps to the timeline of --trace.

    Args:
        workers: the number of workers.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def sent(self, lane: "PushLane", under_way: int) -> None:
        """Writes that a push was sent; so many bytes are under way then."""
        name = f"push bucket {lane.bucket.number} to server {lane.bucket.server}"
        self._write(trace.PUSH, name, lane, lane.sent_at, under_way)

    def answered(self, lane: "PushLane", came: float, under_way: int) -> None:
        """Writes that a push's answer came then, and its weights are in the model."""
        name = f"pull bucket {lane.bucket.number} from server {lane.bucket.server}"
        if self._write(trace.PULL, name, lane, came, under_way):
            trace.span(trace.UNDER_WAY, f"bucket {lane.number}", lane.sent_at, came)
            trace.count("staleness", lane.context.status.staleness)

    def _write(self, track: str, name: str, lane: "PushLane", began: float, under_way: int) -> bool:
        if not trace.records(lane.push.step_of_job(self.workers)):
            return False
        flow = trace.flow_of(
            lane.push.step, lane.push.worker, lane.bucket.server, lane.bucket.number
        )
        trace.span(track, name, began, time.perf_counter(), flow)
        trace.count("bytes under way", under_way)
        return True
