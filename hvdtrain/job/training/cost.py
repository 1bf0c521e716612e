"""Processor time of training, in this process and on the servers."""

import contextlib
import time
from collections.abc import Iterator

from hvdtrain.data import parquet_process
from hvdtrain.job.coordination.synchroniser import Synchroniser


class ProcessorTime:
    """User and system time while training goes on, of this process and of each server.

    The time of all threads counts, also of threads that spin while they wait, and of the process
    that reads Parquet for this one. Evaluations and snapshots are left out, as numerics.clock.Timer
    leaves them out.

    Every worker asks the servers, since another one may lead at the end.
    """

    def __init__(self, sync: Synchroniser) -> None:
        self._sync = sync
        self._began = self._now()

    def seconds(self) -> list[float]:
        """Returns the seconds of this process, and then of each server."""
        return [now - began for now, began in zip(self._now(), self._began, strict=True)]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens in the block."""
        before = self.seconds()
        yield
        self._began = [now - spent for now, spent in zip(self._now(), before, strict=True)]

    def _now(self) -> list[float]:
        own = time.process_time() + parquet_process.cpu_s()
        return [own, *(server["cpu_s"] for server in self._sync.ask_servers("cost"))]
