"""The workers of an elastic ring as a group.

The first worker knows who is there, as the first server does elsewhere.
"""

import json
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch.distributed import TCPStore
from torch.futures import Future

from hvdtrain.base.errors import Failure
from hvdtrain.base.system.connections import Address
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.coordination.server_group import ServerGroup
from hvdtrain.job.ps.bucket import Bucket
from hvdtrain.job.ps.server import Server
from hvdtrain.job.ps.worker_monitor import WorkerMonitor
from hvdtrain.job.wire.rendezvous import leave, store_address
from hvdtrain.job.wire.wire import start

# Seconds within which this worker hears that the first one is gone, after a call to it has failed.
HEARD_S = 1.0


class RingServer(Server):
    """The server on the first worker, which has the roster and no buckets."""

    def __init__(self, workers: int) -> None:
        def make_bucket(*bucket: Any) -> Bucket:
            raise Failure("a ring has no servers")

        super().__init__(workers, make_bucket)
        self._waiting: list[Future[list[int]]] = []
        self._guard = threading.Lock()
        self.calls["await_loss"] = self._await_loss

    def lose(self, worker: int) -> None:
        super().lose(worker)
        with self._guard:
            waiting = self._waiting
            self._waiting = []
        for future in waiting:
            future.set_result(sorted(self.roster.lost))

    def _await_loss(self, known: int) -> "list[int] | Future[list[int]]":
        """Returns the workers that have been lost, as soon as there are more than `known`."""
        with self._guard:
            lost = sorted(self.roster.lost)
            if len(lost) > known:
                return lost
            later = Future[list[int]]()
            self._waiting.append(later)
            return later


class ElasticGroup(ServerGroup):
    """A group whose workers may be lost, and may join.

    Sums are over the workers that are there. Each sum is the same on all workers, also where one is
    lost meanwhile.

    Args:
        job: the job as this rank knows it.
        arrival: the place of a worker that joins; None: it is there from the start.

    Attributes:
        when_lost: called, by another thread, with all workers that have been lost, when there is
            one more.
        report: shows the user a line.
    """

    when_lost: Callable[[Collection[int]], None]
    report: Callable[[str], None]

    def __init__(self, job: Job, arrival: Arrival | None = None) -> None:
        self.when_lost = lambda lost: None
        self.report = print
        world = job.world
        store = job.meet()
        timeout = job.config.timeout
        self.server = RingServer(world.workers) if world.rank == 0 else None
        wire = arrival.wire if arrival else start(world, store, timeout, self.server, "zmq")
        super().__init__(wire, world, store, timeout)
        self.sums = arrival.sums if arrival else 0
        self._first_is_lost = threading.Event()
        if self.server:
            self.wire.endpoints[0] = self.wire.endpoint
            roster = self.server.roster
            self.server.handle(roster, roster.know, {"began": True})
            self.monitor = WorkerMonitor(
                job,
                self.wire,
                store_address(world, store),
                self.server,
                lambda line: self.report(line),
                is_open=True,
            )
            self._monitoring = threading.Thread(
                target=self.monitor.until_all_have_ended, daemon=True, name="monitor"
            )
            self._monitoring.start()
        else:
            self.wire.watch(0, timeout, self._first_has_ended)
        self._await_loss(0)

    def gather(self, value: Any) -> dict[int, Any]:
        """Returns, on all workers, the value of each worker that is there, by its number.

        Args:
            value: a plain value, as JSON holds it.
        """
        slot = self.sums % 2  # see gather_to_first
        self.wire.ask(0, "note", slot, self.worker, json.dumps(value))
        workers, _ = self.all_gather([])
        noted = self.wire.ask(0, "noted", slot)
        return {worker: json.loads(noted[worker]) for worker in workers}

    def open_for_joining(self, state: Callable[[], dict[str, Any]]) -> None:
        """Lets workers that wait join: they are there from the next sum on, and find this state.

        The first worker calls this. The state stays as it is until that sum.
        """
        assert self.server
        began = time.monotonic()
        roster = self.server.roster
        if roster.joining:
            self.server.handle(roster, roster.open_for_joining, self.sums, state(), began)

    def addresses(self) -> set[Address]:
        """Returns addresses, one of which is an end of each connection of this group."""
        store = cast(TCPStore, self.store)
        endpoints = [self.wire.endpoint, *self.wire.endpoints.values()]
        ends = (endpoint.removeprefix("tcp://").rpartition(":") for endpoint in endpoints)
        return {(store.host, store.port), *((host, int(port)) for host, _, port in ends)}

    def lives(self) -> list[dict[str, Any]]:
        """Returns the lives of all workers, on the first one: see runs.membership_log."""
        return [life | {"samples": None} for life in self.wire.ask(0, "lives")]

    def leave_alone(self) -> None:
        """Leaves between two steps, while the others go on."""
        self.wire.ask(0, "depart", self.worker, 0)
        self.wire.leave_now()

    def close(self) -> None:
        """Leaves in order: the first worker when all others have left, or are lost."""
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
            self.when_lost([0])

    def _await_loss(self, known: int) -> None:
        self.wire.call(0, "await_loss", known).add_done_callback(self._heard)

    def _heard(self, answer: "Future[list[int]]") -> None:
        try:
            lost = answer.value()
        except Exception:  # this worker leaves, or the first worker is lost
            return
        self.when_lost(lost)
        self._await_loss(len(lost))
