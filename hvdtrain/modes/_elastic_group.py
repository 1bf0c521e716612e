"""The workers of an elastic ring as a group: the first one knows who is there, as the first server does elsewhere."""

import json
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch.distributed import TCPStore
from torch.futures import Future

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.joining import Arrival
from hvdtrain.coordination.server_group import ServerGroup
from hvdtrain.errors import Failure
from hvdtrain.ps.bucket import Bucket
from hvdtrain.ps.desk import Desk
from hvdtrain.ps.worker_monitor import WorkerMonitor
from hvdtrain.system.connections import Address
from hvdtrain.wire.rendezvous import leave, store_address
from hvdtrain.wire.wire import start

FOR_EVER = 1e9  # seconds
HEARD_S = 1.0  # within which this worker hears that the first one is gone, when a call to it has failed


class RingDesk(Desk):
    """What the first worker answers: it has the roster and no buckets."""

    def __init__(self, workers: int) -> None:
        def make_bucket(number: int, weights: torch.Tensor) -> Bucket:
            raise Failure("a ring has no servers")

        super().__init__(workers, make_bucket)
        self._waiting: list[Future[list[int]]] = []
        self._guard = threading.Lock()
        self.calls["await_loss"] = self._await_loss

    def lose(self, worker: int) -> None:
        super().lose(worker)
        with self._guard:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(sorted(self.roster.lost))

    def _await_loss(self, known: int) -> "list[int] | Future[list[int]]":
        """The workers that have been lost, as soon as they are more than so many."""
        with self._guard:
            if len(lost := sorted(self.roster.lost)) > known:
                return lost
            self._waiting.append(Future())
            return self._waiting[-1]


class ElasticGroup(ServerGroup):
    """Sums are over the workers that are there; each is the same on all of them, also of one that is lost amid it.

    Args:
        when_lost: called, by another thread, with the workers that have been lost, when there is one more.
        report: shows the user a line.
        arrival: of a worker that joins.
    """

    def __init__(
        self, job: Job, when_lost: Callable[[Collection[int]], None], report: Callable[[str], None],
        arrival: Arrival | None = None,
    ) -> None:  # fmt: skip
        world, store, timeout = job.world, job.meet(), job.config.timeout
        self.desk = RingDesk(world.workers) if world.rank == 0 else None
        super().__init__(
            arrival.wire if arrival else start(world, store, timeout, self.desk, "zmq"), world, store, timeout
        )
        self.sums = arrival.sums if arrival else 0
        self._when_lost = when_lost
        self._first_is_lost = threading.Event()
        if self.desk:
            self.wire.endpoints[0] = self.wire.endpoint
            self.desk.act(self.desk.roster, "know", {"began": True})
            self.monitor = WorkerMonitor(job, self.wire, store_address(world, store), self.desk, report, is_open=True)
            self._monitoring = threading.Thread(target=self.monitor.until_all_have_ended, daemon=True, name="monitor")
            self._monitoring.start()
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

    def open_for_joining(self, state: Callable[[], dict[str, Any]]) -> None:
        """The first worker: whoever waits to join is there from the next sum on, and finds this state, which stays as
        it is until that sum.
        """
        assert self.desk
        began = time.monotonic()
        if self.desk.roster.joining:
            self.desk.act(self.desk.roster, "open_for_joining", self.sums, state(), began)

    def addresses(self) -> set[Address]:
        """One of which each connection of this group ends at, here or there."""
        store = cast(TCPStore, self.store)
        endpoints = [self.wire.endpoint, *self.wire.endpoints.values()]
        ends = (endpoint.removeprefix("tcp://").rpartition(":") for endpoint in endpoints)
        return {(store.host, store.port), *((host, int(port)) for host, _, port in ends)}

    def lives(self) -> list[dict[str, Any]]:
        """See coordination.membership_log; on the first worker."""
        return [life | {"samples": None} for life in self.wire.ask(0, "lives")]

    def close(self) -> None:
        """Leave in order. The first worker does so when all others have, or are lost."""
        self.wire.requests.leave()
        if self.leads:
            self._monitoring.join()
            self.monitor.close()
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
                        "rank 0 is lost: --elastic survives the loss of any rank but this one, which "
                        "knows who is there and saves"
                    ) from None
                raise

        return wait

    def _first_has_ended(self, why: str) -> None:
        if why:
            self._first_is_lost.set()
            self._when_lost([0])

    def _await_loss(self, known: int) -> None:
        self.wire.call(0, "await_loss", known, timeout=FOR_EVER).add_done_callback(self._heard)

    def _heard(self, answer: "Future[list[int]]") -> None:
        try:
            lost = answer.value()
        except Exception:  # this worker leaves, or the first one is lost
            return
        self._when_lost(lost)
        self._await_loss(len(lost))
