"""Who of the workers is there, as a server sees to it: it watches each, lets go who is lost, and lets others in.

The first server decides: it numbers those who join, and leases the shares of a lost worker again when every server has
declared it lost, so that no push of it can come after one of whoever trains on them then.
"""

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from hvdtrain.coordination.job import Job
from hvdtrain.coordination.join_info import JoinInfo, servers_return, write_join_info
from hvdtrain.coordination.membership_log import LEFT, MembershipLog, membership_file, who_is_lost
from hvdtrain.errors import Failure
from hvdtrain.ps.desk import Desk
from hvdtrain.wire.wire import Wire
from hvdtrain.world.host import boot_id
from hvdtrain.world.network import WIRE_KEY
from hvdtrain.world.place import RESPAWNS

OVER = "the job is over: there is nothing left to join"


class WorkerMonitor:
    """Watches the workers, from when all ranks have met.

    Args:
        store: where the store is that all ranks share.
        report: shows the user a line.
        is_open: whether workers can join and come back.
        recovered: this server was killed, and is back.

    Attributes:
        there: the workers that have not been lost.
    """

    def __init__(
        self, job: Job, wire: Wire, store: tuple[str, int], desk: Desk, report: Callable[[str], None], is_open: bool,
        recovered: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.world, self.wire, self.desk, self.report = job.config, job.world, wire, desk, report
        self.present = set(desk.roster.present)
        self.at_work = len(self.present)  # neither lost nor done
        self._events: SimpleQueue[tuple[int, str | None]] = SimpleQueue()  # a worker, and why it ended; None: it joined
        self._lives: MembershipLog | None = None
        self._open_door: Path | None = None
        self._ended: set[int] = set()
        if self.world.rank == 0:
            self._lives = MembershipLog(membership_file(job.folder), self.world.servers, self.world.workers, recovered)
            desk.calls["lives"] = self._rows
            if is_open:
                info = JoinInfo(
                    *store, os.environ.get(WIRE_KEY, ""), self.world.size, self.world.is_local, boot_id(), os.getpid(),
                    servers_return(job.config),
                )  # fmt: skip
                self._open_door = write_join_info(job.folder, info)
        desk.departed = lambda worker: self._events.put((worker, LEFT))
        if recovered:
            self._finish_interrupted_changes()
        for worker in sorted(self.present):
            self._watch(worker)
        if is_open:
            desk.arrived = self._arrived

    def _finish_interrupted_changes(self) -> None:
        """Finish what this server was doing when it was killed: admitting, losing and letting go of workers."""
        members = {life.member: life for life in self._lives.all()} if self._lives else {}
        for worker in sorted(self.present):
            if self._lives and worker not in members:  # it was admitted, but never answered
                self.desk.lose(worker)
                self.desk.act(self.desk.leases, "lose", worker)
                self.present.discard(worker)
            elif worker in self.desk.roster.departed:
                self._events.put((worker, LEFT))
        for worker, life in members.items():
            if life.why and worker not in self.desk.leases.lost:  # others may not know yet
                self.present.add(worker)
                self._events.put((worker, life.why))
        self.at_work = len(self.present)

    def until_all_have_ended(self) -> None:
        """Return when every worker is done or lost.

        Raises:
            Failure: one was lost, and the others cannot go on; or all were.
        """
        while self.at_work or not self.present:
            try:
                # Where all are lost, one that is started again goes on where they were.
                worker, why = self._events.get(timeout=self.config.timeout if not self.at_work else None)
            except Empty:
                raise Failure("all workers are lost, and none came back") from None
            if why is None:
                self.present.add(worker)
                self.at_work += 1
            elif worker not in self._ended:
                self._ended.add(worker)
                self.at_work -= 1
                if why:
                    self._lose(worker, why)
        self.desk.arrived = None
        self.desk.act(self.desk.roster, "close", OVER)
        if self._lives and (lost := who_is_lost(self._lives.all())):
            self.report(f"the job ended with {lost}")

    def close(self) -> None:
        """Nobody can join any more."""
        if self._open_door:
            self._open_door.unlink(missing_ok=True)
        if self._lives:
            self._lives.close()

    def _watch(self, worker: int) -> None:
        ended = partial(lambda worker, why: self._events.put((worker, why)), worker)
        self.wire.watch(self.world.servers + worker, self.config.timeout, ended)

    def _arrived(self, worker: int, endpoint: str, pid: int) -> dict[str, Any]:
        """Somebody joins: the first server gives them a place, and all of them watch."""
        life = self._lives.begin(worker, pid) if self._lives else None
        self.wire.endpoints[self.world.servers + worker] = endpoint
        self.desk.act(self.desk.roster, "know", {"others": dict(self.wire.endpoints)})
        self._events.put((worker, None))
        self._watch(worker)
        return {"rank": life.rank, "incarnation": life.incarnation} if life else {}

    def _lose(self, worker: int, why: str) -> None:
        """Go on without a worker. Failure where that cannot be."""
        life = self._lives.end(worker, why) if self._lives else None
        rank = life.rank if life else self.world.servers + worker
        if not self.desk.roster.began:
            raise Failure(f"rank {rank} was lost before training began: {why}")
        self.present.discard(worker)
        try:
            self.desk.lose(worker)
        except Failure as reason:
            raise Failure(f"rank {rank} is lost, and {reason}: {why}") from None
        if self.world.rank != 0:
            return
        for other in range(1, self.world.servers):
            self.wire.ask(other, "lose", worker)
        self.desk.act(self.desk.leases, "lose", worker)
        if not self.present and not os.environ.get(RESPAWNS):
            raise Failure(f"rank {rank}, the last worker, is lost: {why}")
        said = "has left" if why == LEFT else "is lost"
        self.report(f"hvdtrain: rank {rank} {said}, and the others go on without it{'' if why == LEFT else ': ' + why}")

    def _rows(self) -> list[dict[str, Any]]:
        """What the first server knows of each life."""
        assert self._lives
        samples = self.desk.leases.samples
        return [asdict(life) | {"samples": samples.get(life.member, 0)} for life in self._lives.all()]
