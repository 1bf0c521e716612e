"""How fast this machine's memory is: the floor under whatever moves bytes."""

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

COPIED = 64 * 2**20  # bytes, more than caches hold
REPEATS = 5


def bandwidth() -> float:
    """Bytes a second that all cores together read and write when each copies memory."""
    import numpy as np

    cores = len(os.sched_getaffinity(0))
    pairs = [(np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8)) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), pairs))  # which lets go of the interpreter
            times.append(time.perf_counter() - began)
    return 2 * COPIED * cores / statistics.median(times)
