"""The workers of an elastic ring as a group: the first one knows who is there, as the first server does elsewhere."""

import json
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.server_group import ServerGroup
from hvdtrain.errors import Failure
from hvdtrain.ps.bucket import Bucket
from hvdtrain.ps.desk import Desk
from hvdtrain.ps.worker_monitor import WorkerMonitor
from hvdtrain.wire.rendezvous import leave
from hvdtrain.wire.requests import WATCH
from hvdtrain.wire.wire import start

FOR_EVER = 1e9  # seconds
HEARD_S = 1.0  # within which this worker hears that the first one is gone, when a call to it has failed


class RingDesk(Desk):
    """What the first worker answers: it has the roster and no buckets."""

    def __init__(self, workers: int) -> None:
        def make_bucket(number: int, weights: torch.Tensor) -> Bucket:
            raise Failure("a ring has no servers")

        super().__init__(workers, make_bucket)
        self._waiting: list[Future[int]] = []
        self._guard = threading.Lock()
        self.calls["await_loss"] = self._await_loss

    def lose(self, worker: int) -> None:
        super().lose(worker)
        with self._guard:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(len(self.roster.lost))

    def _await_loss(self, known: int) -> "int | Future[int]":
        """How many workers have been lost, as soon as they are more than the known ones."""
        with self._guard:
            if (lost := len(self.roster.lost)) > known:
                return lost
            self._waiting.append(Future())
            return self._waiting[-1]


class ElasticGroup(ServerGroup):
    """Sums are over the workers that are there; each is the same on all of them, also of one that is lost amid it.

    Args:
        when_lost: called, by another thread, with how many workers have been lost, when there is one more.
        report: shows the user a line.
    """

    def __init__(self, job: Job, when_lost: Callable[[int], None], report: Callable[[str], None]) -> None:
        world, store, timeout = job.world, job.meet(), job.config.timeout
        desk = RingDesk(world.workers) if world.rank == 0 else None
        super().__init__(start(world, store, timeout, desk, "zmq"), world, store, timeout)
        self._when_lost = when_lost
        self._first_is_lost = threading.Event()
        if desk:
            self.wire.endpoints[0] = self.wire.endpoint
            desk.act(desk.roster, "know", {"began": True})
            self.monitor = WorkerMonitor(job, self.wire, ("", 0), desk, report, is_open=False)
            self._monitoring = threading.Thread(target=self.monitor.until_all_have_ended, daemon=True, name="monitor")
            self._monitoring.start()
            for rank in range(world.size):  # now: what is connected to later might be taken for the ring's
                self.wire.call(rank, WATCH).wait()
        else:
            self.wire.watch(0, timeout, self._first_has_ended)
        self._await_loss(0)

    def gather(self, value: Any) -> dict[int, Any]:
        """What each worker that is there gives, by its number, on all of them: plain values, as JSON holds them."""
        slot = self.sums % 2  # see gather_to_first
        self.wire.ask(0, "note", slot, self.worker, json.dumps(value))
        workers, _ = self.all_gather([])
        noted = self.wire.ask(0, "noted", slot)
        return {worker: json.loads(noted[worker]) for worker in workers}

    def lives(self) -> list[dict[str, Any]]:
        """See coordination.membership_log; on the first worker."""
        return [life | {"samples": None} for life in self.wire.ask(0, "lives")]

    def close(self) -> None:
        """Leave in order. The first worker does so when all others have, or are lost."""
        self.wire.requests.leave()
        if self.leads:
            self._monitoring.join()
            leave(0, self.store, self.timeout, (), self.monitor.present)
        else:
            leave(self.worker, self.store, self.timeout, (0,), ())
        self.wire.close()

    def _later(self, values: torch.Tensor, as_rows: bool) -> Callable[[], torch.Tensor]:
        found = super()._later(values, as_rows)

        def wait() -> torch.Tensor:
            try:
                return found()
            except Failure:
                if self._first_is_lost.wait(HEARD_S):
                    raise Failure(
                        "rank 0 is lost, which knows who is there and saves: --elastic goes on without any other rank"
                    ) from None
                raise

        return wait

    def _first_has_ended(self, why: str) -> None:
        if why:
            self._first_is_lost.set()
            self._when_lost(self.workers)

    def _await_loss(self, known: int) -> None:
        self.wire.call(0, "await_loss", known, timeout=FOR_EVER).add_done_callback(self._heard)

    def _heard(self, answer: "Future[int]") -> None:
        try:
            lost = answer.value()
        except Exception:  # this worker leaves, or the first one is lost
            return
        self._when_lost(lost)
        self._await_loss(lost)
