"""How far the clocks of ranks are apart, without trusting any of them."""

import math
import time

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.synchroniser import Synchroniser
from hvdtrain.world.host import own_clock

ROUNDS = 20


def compare_clocks(job: Job, sync: Synchroniser) -> dict[int, tuple[float, float]]:
    """By rank, the seconds that its clock is ahead of the first worker's, and how far that may be off; on the first
    worker, elsewhere nothing. All workers call it together.

    At a barrier nobody leaves before all have come. So another's clock, when it leaves, is not before this one's when
    it came, and the other way round; of many barriers the narrowest such bounds count. A server's clock, in its answer,
    is between the question and the answer. (The bounds of Marzullo & Owicki, 1983, on intervals that must overlap.)
    Processes of one machine read the same clock.
    """
    group, servers, clock_here = sync.group, job.world.servers, own_clock()
    came, left = [], []
    for _ in range(ROUNDS):
        came.append(time.perf_counter())
        group.barrier()
        left.append(time.perf_counter())
    of_workers = group.gather_to_first({"rank": job.world.rank, "clock": clock_here, "came": came, "left": left})
    found = {}
    for worker, its in of_workers.items():
        low = max(there - here for there, here in zip(its["came"], left, strict=True))
        high = min(there - here for there, here in zip(its["left"], came, strict=True))
        is_same = its["clock"] == clock_here > 0 or worker == group.worker
        found[its["rank"]] = (0.0, 0.0) if is_same else ((low + high) / 2, (high - low) / 2)
    if not group.leads:
        return {}
    for _ in range(ROUNDS if servers else 0):
        asked = time.perf_counter()
        answers = sync.ask_servers("now")
        answered = time.perf_counter()
        for rank, (clock, now) in enumerate(answers):
            offset, uncertainty = found.get(rank, (0.0, 0.0 if clock == clock_here > 0 else math.inf))
            if not uncertainty:
                found[rank] = 0.0, 0.0
                continue
            low, high = max(offset - uncertainty, now - answered), min(offset + uncertainty, now - asked)
            found[rank] = ((low + high) / 2, (high - low) / 2)
    return found
