"""A worker's pushes and waits in the timeline of --trace."""

import time
from typing import TYPE_CHECKING, Any

from hvdtrain.numerics.split import step_of_share
from hvdtrain.ps.messages import NO_SHARE
from hvdtrain.world import trace

if TYPE_CHECKING:
    from hvdtrain.ps.exchange import Lane

SHORTEST_S = 5e-5  # of waits for weights: most layers' are there


class PushTrace:
    """Writes down the pushes of recorded steps, and waits in them. An observer of ps.exchange.Exchange.

    Args:
        worker, workers: this worker's number, and of how many.
    """

    def __init__(self, worker: int, workers: int) -> None:
        self.worker, self.workers = worker, workers

    def sent(self, lane: "Lane", under_way: int) -> None:
        """A push has been sent; so many bytes are under way with it."""
        if self._records(lane):
            name = f"push bucket {lane.piece.number} to server {lane.piece.server}"
            trace.span(trace.PUSH, name, lane.sent_at, time.perf_counter(), self._flow(lane))
            trace.count("bytes under way", under_way)

    def answered(self, lane: "Lane", came: float, under_way: int) -> None:
        """A push's answer came then, and its weights are in the model."""
        if self._records(lane):
            trace.span(trace.UNDER_WAY, f"bucket {lane.number}", lane.sent_at, came)
            name = f"pull bucket {lane.piece.number} from server {lane.piece.server}"
            trace.span(trace.PULL, name, came, time.perf_counter(), self._flow(lane))
            trace.count("bytes under way", under_way)
            trace.count("staleness", lane.context.status.staleness)

    def waited(self, began: Any, ended: Any) -> None:
        """Forward waited for weights; on a GPU the moments are events, which nobody waits for here."""
        if trace.is_recording() and isinstance(began, float) and ended - began > SHORTEST_S:
            trace.span(trace.STEP, "comm", began, ended)

    def _records(self, lane: "Lane") -> bool:
        step, share = lane.context.step, lane.context.share
        return trace.records(step if share == NO_SHARE else step_of_share(share, self.workers))

    def _flow(self, lane: "Lane") -> int:
        return trace.flow_of(lane.context.step, self.worker, lane.piece.server, lane.piece.number)
