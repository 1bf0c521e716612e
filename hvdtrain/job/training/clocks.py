"""A comparison of the ranks' clocks, which trusts none of them."""

import math
import time
from typing import NamedTuple

from hvdtrain.base.world.host import own_clock
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import Synchroniser

ROUNDS = 20  # how many barriers and answers are timed


class Offset(NamedTuple):
    """The distance of a rank's clock from the clock of the worker that leads, in seconds.

    Attributes:
        ahead: how far the rank's clock is ahead.
        uncertainty: how far `ahead` may be off.
    """

    ahead: float
    uncertainty: float


SAME = Offset(0.0, 0.0)


def compare_clocks(job: Job, sync: Synchroniser) -> dict[int, Offset]:
    """Returns the offset of each rank's clock, on the worker that leads; empty on other workers.

    All workers call this together. The bounds are of Marzullo & Owicki, 1983, on intervals that
    must overlap. Processes of one machine read the same clock.
    """
    offsets = _offsets_of_workers(job, sync)
    if not sync.group.leads:
        return {}
    if job.world.servers:
        offsets |= _offsets_of_servers(sync)
    return offsets


def _offsets_of_workers(job: Job, sync: Synchroniser) -> dict[int, Offset]:
    """Returns the offset of each worker's clock by rank, on the worker that leads.

    Nobody leaves a barrier before all have come. So another worker's clock, when that worker
    leaves, is not before this worker's clock when this worker came, and the other way round. Of
    many barriers the narrowest bounds count.
    """
    group = sync.group
    clock_here = own_clock()
    came = []
    left = []
    for _ in range(ROUNDS):
        came.append(time.perf_counter())
        group.barrier()
        left.append(time.perf_counter())
    own = {"rank": job.world.rank, "clock": clock_here, "came": came, "left": left}
    offsets = {}
    for worker, times in group.gather_to_first(own).items():
        if worker == group.worker or times["clock"] == clock_here > 0:
            offsets[times["rank"]] = SAME
            continue
        low = max(there - here for there, here in zip(times["came"], left, strict=True))
        high = min(there - here for there, here in zip(times["left"], came, strict=True))
        offsets[times["rank"]] = _between(low, high)
    return offsets


def _offsets_of_servers(sync: Synchroniser) -> dict[int, Offset]:
    """Returns the offset of each server's clock by rank.

    A server reads its clock between the question and the answer. Of many answers the narrowest
    bounds count.
    """
    clock_here = own_clock()
    lowest: dict[int, float] = {}
    highest: dict[int, float] = {}
    same = set()
    for _ in range(ROUNDS):
        asked_at = time.perf_counter()
        answers = sync.ask_servers("now")
        answered_at = time.perf_counter()
        for rank, (clock, now) in enumerate(answers):
            if clock == clock_here > 0:
                same.add(rank)
            lowest[rank] = max(lowest.get(rank, -math.inf), now - answered_at)
            highest[rank] = min(highest.get(rank, math.inf), now - asked_at)
    return {
        rank: SAME if rank in same else _between(lowest[rank], highest[rank]) for rank in lowest
    }


def _between(low: float, high: float) -> Offset:
    """Returns the offset that is between two bounds."""
    return Offset((low + high) / 2, (high - low) / 2)
