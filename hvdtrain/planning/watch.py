"""How much of this machine is busy with other work while something is measured."""

import resource
import time

from hvdtrain.base.world.load import HostLoad, by_host, others_share

# A measurement beside other work is made so often at most.
MOST_TIMES = 2
# Linux counts in hundredths of a second: a shorter time does not tell.
LEAST_S = 0.05


class Watch:
    """Measures what other processes and other guests of this machine take from now on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._load = HostLoad()
        self._own_s = _own_seconds()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def others(self, before: float = 0.0) -> float:
        """Returns the share of all cores that other processes and other guests had.

        0 where Linux does not say.

        Args:
            before: is returned if the time is too short to measure.
        """
        if self.seconds < LEAST_S:
            return before
        own_s = _own_seconds() - self._own_s
        [load] = by_host({"here": self._load.since()}, {"here": own_s}).values()
        return others_share(load)


def _own_seconds() -> float:
    """Returns the processor seconds of this process, and of its children that have ended."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_children.ru_utime + of_children.ru_stime
