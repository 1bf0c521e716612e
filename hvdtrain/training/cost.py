"""Processor time that training takes, in this process and on the servers."""

import contextlib
import time
from collections.abc import Iterator

from hvdtrain.coordination.synchroniser import Synchroniser


class ProcessorTime:
    """Seconds of user and system time while training goes on, of all threads; what is not training is left out, as
    numerics.clock.Timer does. Threads that spin while they wait take time too.

    Each worker asks the servers, and has theirs after its own: the one that leads may be another at the end.
    """

    def __init__(self, sync: Synchroniser) -> None:
        self._sync = sync
        self._began = self._now()

    def seconds(self) -> list[float]:
        return [now - began for now, began in zip(self._now(), self._began, strict=True)]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in the block does not count."""
        before = self.seconds()
        yield
        self._began = [now - spent for now, spent in zip(self._now(), before, strict=True)]

    def _now(self) -> list[float]:
        return [time.process_time(), *(server["cpu_s"] for server in self._sync.ask_servers("cost"))]
