"""A server's watch over the workers: it lets lost workers go, and new ones in.

The first server decides. It numbers workers that join. It leases a lost worker's shares again when
every server has declared the worker lost: none of its pushes can come after a push of the worker
that trains on the same share then.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.host import boot_id
from hvdtrain.base.world.network import WIRE_KEY
from hvdtrain.base.world.place import RESPAWNS
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.ps.server import Server
from hvdtrain.job.wire.wire import Wire
from hvdtrain.runs.join_info import JoinInfo, servers_return, write_join_info
from hvdtrain.runs.membership_log import LEFT, MembershipLog, membership_file, who_is_gone

OVER = "the job is over: there is nothing left to join"


class WorkerMonitor:
    """Watches the workers, from when all ranks have met.

    Args:
        job: the job as this rank knows it.
        wire: carries the watches.
        store: the host and port of the store that all ranks share.
        server: the server that workers push to.
        report: shows the user a line.
        is_open: whether workers can join and come back.
        recovered: whether this server was killed, and is back.

    Attributes:
        present: the workers that are not lost.
        at_work: how many workers are neither lost nor done.
    """

    def __init__(
        self,
        job: Job,
        wire: Wire,
        store: tuple[str, int],
        server: Server,
        report: Callable[[str], None],
        is_open: bool,
        recovered: bool = False,
    ) -> None:
        self.config = job.config
        self.world = job.world
        self.wire = wire
        self.server = server
        self.report = report
        self.present = set(server.roster.present)
        self.at_work = len(self.present)
        # A worker, and why it ended: "" where it is done, None where it has joined.
        self._events: deque[tuple[int, str | None]] = deque()
        self._changed = wire.condition()  # notified when there is another event
        self._ended: set[int] = set()
        self._log: MembershipLog | None = None
        self._join_info: Path | None = None
        if self.world.rank == 0:
            file = membership_file(job.folder)
            self._log = MembershipLog(file, self.world.servers, self.world.workers, recovered)
            server.calls["lives"] = self._lives
            if is_open:
                self._join_info = self._write_join_info(job, store)
        server.departed = lambda worker: self._has_ended(worker, LEFT)
        if recovered:
            self._finish_interrupted_changes()
        for worker in sorted(self.present):
            self._watch(worker)
        if self.world.rank == 0:
            for other in range(1, self.world.servers):  # this server asks them: see Wire.result
                wire.watch(other, self.config.timeout, lambda why: None)
        if is_open:
            server.arrived = self._arrived

    def _write_join_info(self, job: Job, store: tuple[str, int]) -> Path:
        """Writes join.json, by which workers find the job."""
        host, port = store
        info = JoinInfo(
            host,
            port,
            os.environ.get(WIRE_KEY, ""),
            self.world.size,
            self.world.is_local,
            boot_id(),
            os.getpid(),
            servers_return(job.config),
        )
        return write_join_info(job.folder, info)

    def _finish_interrupted_changes(self) -> None:
        """Finishes what this server was doing when it was killed: admitting and losing workers."""
        server = self.server
        members = {life.member: life for life in self._log.all()} if self._log else {}
        for worker in sorted(self.present):
            if self._log and worker not in members:  # it was admitted, but never answered
                server.lose(worker)
                server.handle(server.leases, server.leases.lose, worker)
                self.present.discard(worker)
            elif worker in server.roster.departed:
                self._has_ended(worker, LEFT)
        for worker, life in members.items():
            if life.why and worker not in server.leases.lost:  # other servers may not know yet
                self.present.add(worker)
                self._has_ended(worker, life.why)
        self.at_work = len(self.present)

    def until_all_have_ended(self) -> None:
        """Blocks until every worker is done or lost.

        Raises:
            Failure: a worker was lost, and the others cannot go on; or all were.
        """
        while self.at_work or not self.present:
            worker, why = self._next_event()
            if why is None:
                self.present.add(worker)
                self.at_work += 1
            elif worker not in self._ended:
                self._ended.add(worker)
                self.at_work -= 1
                if why:
                    self._lose(worker, why)
        self.server.arrived = None
        roster = self.server.roster
        self.server.handle(roster, roster.close, OVER)
        gone = who_is_gone(self._log.all()) if self._log else ""
        if gone:
            self.report(f"the job ended with {gone}")

    def close(self) -> None:
        """Lets nobody join any more."""
        if self._join_info:
            self._join_info.unlink(missing_ok=True)
        if self._log:
            self._log.close()

    def _watch(self, worker: int) -> None:
        ended = partial(self._has_ended, worker)
        self.wire.watch(self.world.servers + worker, self.config.timeout, ended)

    def _has_ended(self, worker: int, why: str) -> None:
        self._note(worker, why)

    def _note(self, worker: int, why: str | None) -> None:
        """Leaves an event to `until_all_have_ended`."""
        with self._changed:
            self._events.append((worker, why))
            self._changed.notify_all()

    def _next_event(self) -> tuple[int, str | None]:
        """Blocks until there is another event; returns it.

        Raises:
            Failure: all workers are lost, and none has come back within the timeout.
        """
        # Where all workers are lost, one that is started again goes on where they were.
        limit = None if self.at_work else self.config.timeout
        with self._changed:
            if not self._changed.wait_for(lambda: self._events, limit):
                raise Failure("all workers are lost, and none came back")
            return self._events.popleft()

    def _arrived(self, worker: int, endpoint: str, pid: int) -> dict[str, Any]:
        """Watches a worker that joins.

        Returns:
            On the first server, the worker's place: its rank, and which life there it is.
        """
        life = self._log.begin(worker, pid) if self._log else None
        self.wire.endpoints[self.world.servers + worker] = endpoint
        roster = self.server.roster
        self.server.handle(roster, roster.know, {"others": dict(self.wire.endpoints)})
        self._note(worker, None)
        self._watch(worker)
        return {"rank": life.rank, "incarnation": life.incarnation} if life else {}

    def _lose(self, worker: int, why: str) -> None:
        """Goes on without a worker.

        Raises:
            Failure: the others cannot go on.
        """
        life = self._log.end(worker, why) if self._log else None
        rank = life.rank if life else self.world.servers + worker
        server = self.server
        if not server.roster.began:
            raise Failure(f"rank {rank} was lost before training began: {why}")
        self.present.discard(worker)
        try:
            server.lose(worker)
        except Failure as reason:
            raise Failure(f"rank {rank} is lost, and {reason}: {why}") from None
        if not self.present and not os.environ.get(RESPAWNS):
            raise Failure(f"rank {rank}, the last worker, is lost: {why}")
        if self.world.rank != 0:
            return
        for other in range(1, self.world.servers):
            self.wire.ask(other, "lose", worker)
        server.handle(server.leases, server.leases.lose, worker)
        if why == LEFT:
            self.report(f"hvdtrain: rank {rank} has left, and the others go on without it")
        else:
            self.report(f"hvdtrain: rank {rank} is lost, and the others go on without it: {why}")

    def _lives(self) -> list[dict[str, Any]]:
        """Returns the rows of `membership` in summary.json, one of each life."""
        assert self._log
        samples = self.server.leases.samples
        return [asdict(life) | {"samples": samples.get(life.member, 0)} for life in self._log.all()]
