"""What peers can ask of a server, and the order in which that is done: a part handles the message, what came of it is
written down, answers go out, and what it took is counted.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.ps.bucket import Bucket
from hvdtrain.ps.journal import LEASES, Journal
from hvdtrain.ps.leases import Leases
from hvdtrain.ps.messages import GIVEN_UP, Answer, Part, Push
from hvdtrain.ps.roster import Joined, Roster
from hvdtrain.ps.server_metrics import Load
from hvdtrain.ps.shared import SharedMemory
from hvdtrain.world import trace
from hvdtrain.world.host import describe, own_clock, speed_variables

# The methods that peers call, by name. Each returns at once, or returns a future.
CALLS = (
    "push", "pull", "idle", "install", "restore", "optimizer_state",
    "sum", "missing", "note", "noted", "leave",
    "lease", "await_lease", "pause_leases",
    "join", "admit", "open_for_joining", "depart", "lose", "returns",
)  # fmt: skip


class Desk:
    """One in a server.

    Args:
        workers: how many there are at the start.
        make_bucket: a bucket from its number and the weights it is given.
        decode: a gradient, [bucket] float32, from the tensors that were sent.
        load: counts what this server does.
        journal: writes down what parts do, and tells them what they knew.
        shared: by which tensors come and go on one host.

    Attributes:
        calls: what peers can ask for, by name.
        owed: answers that are not there yet, by part and by who waits.
        heard: when a worker last sent something.
        arrived: what is done about whoever joins, by number, endpoint and process; None: nobody can, or not yet: a
            server that comes back looks first who is there.
        departed: what is done about a worker that leaves in order.
    """

    def __init__(
        self,
        workers: int,
        make_bucket: Callable[[int, torch.Tensor], Bucket],
        decode: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        load: Load | None = None,
        journal: Journal | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        self.make_bucket, self.decode, self.journal = make_bucket, decode, journal
        self.load, self.shared = load or Load(), shared or SharedMemory()
        self.waited: Callable[[str, float], None] = self.load.waited
        self.owed: dict[tuple[Part, Any], Future[Any]] = {}
        self.load.held = lambda: [key for key in list(self.owed) if isinstance(key[0], Bucket)]
        self._locks: dict[Part, threading.Lock] = {}
        self.buckets: dict[int, Bucket] = {}
        self.roster, self.leases = Roster(workers), Leases()
        self._keep(self.roster, "roster")
        self._keep(self.leases, LEASES)
        self._changing = threading.RLock()  # who is there: whoever joins is in all buckets or in none
        self._began = time.monotonic()
        self.heard: dict[int, float] = {}
        self.arrived: Callable[[int, str, int], dict[str, Any]] | None = None
        self.departed: Callable[[int], None] = lambda worker: None
        self._left: set[int] = set()
        self.calls: dict[str, Callable[..., Any]] = {name: getattr(self, name) for name in CALLS}
        self.calls |= {"cost": self.load.cost, "now": _now, "traced": _traced, "host": _host, "lives": list}

    def _keep(self, part: Part, name: str | int) -> None:
        self._locks[part] = threading.Lock()
        if self.journal:
            self.journal.keep(part, name)

    def _act(self, part: Part, act: Callable[..., Any], *message: Any, key: Any = None) -> Any:
        """Have a part handle a message. Its answer, or a future of that.

        Args:
            key: who asks, if it is answered with one of the part's replies, now or later.
        """
        lock, place, own, sent = self._locks[part], (part, key), None, 0
        try:
            if not lock.acquire(blocking=False):
                began = time.perf_counter()
                lock.acquire()
                self.waited(act.__name__, time.perf_counter() - began)
            try:
                replies, lines = act(*message)
                if self.journal:
                    self.journal.commit(part, lines)
                if key is not None and key not in replies and (own := self.owed.get(place)) is None:
                    own = self.owed[place] = Future()  # under the part's lock, so that no reply is missed
            finally:
                lock.release()
            if replies:
                answer, sent = self._answer(part, key, replies)
                own = answer if key in replies else own
        finally:
            self.load.handled(place, sent)
        if isinstance(own, Failure):
            raise own
        return own

    def _answer(self, part: Part, key: Any, replies: Mapping[Any, Any]) -> tuple[Any, int]:
        """Send replies to those who wait. That to the key, and how many bytes of weights were sent."""
        own, sent = None, 0
        for to, value in replies.items():
            future = self.owed.pop((part, to), None)
            if future is None and to != key:
                continue  # it asks again, and is answered then
            if isinstance(value, Answer):
                version, staleness, weights, dropped = value
                sent += weights.nbytes
                content = part, version, weights.data_ptr()  # of a version there may be two kinds
                value = Answer(version, staleness, self.shared.put(weights, to, content), dropped)
            elif isinstance(value, Joined):
                value = self._place_joiner(value, *to)
            if to == key:
                own = value
            if future is not None:
                _settle(future, value)
        return own, sent

    def _read(self, part: Part, ask: Callable[..., Any], *message: Any) -> Any:
        """What a part says that changes nothing."""
        with self._locks[part]:
            return ask(*message)

    # Buckets

    def push(self, bucket: int, push: Push) -> "Answer | Future[Answer]":
        """Take a worker's encoded gradient. Its answer, or a future of that where it may not go on yet."""
        worker, own = push.worker, self.buckets[bucket]
        self.heard[worker] = time.monotonic()
        if self.roster.returned:
            self._count_lost_updates(bucket, push)
        gradient, size = None, 0
        # A push that comes again is not read: its shared memory may have been used for another one since.
        if not own.has(push):
            tensors = [self.shared.get(tensor) for tensor in push.gradient]
            gradient, size = self.decode(tensors), sum([tensor.nbytes for tensor in tensors])
        self.load.took((own, worker), size)
        kept = Push(worker, push.step, push.version_read, push.lr, None, push.share)
        return self._act(own, own.push, kept, gradient, key=worker)

    def _count_lost_updates(self, bucket: int, push: Push) -> None:
        """Note it where a worker has had a newer version of the weights than are here: there is none, or a kill has
        cost the updates in between.
        """
        behind = push.version_read - self.buckets[bucket].shard.version
        if behind > self.roster.lost_updates.get(bucket, 0):
            self._act(self.roster, self.roster.lose_updates, bucket, behind)

    def pull(self, bucket: int, worker: int) -> Answer:
        """A bucket as it is. The worker pushes nothing before it has it."""
        own = self.buckets[bucket]
        return self._act(own, own.pull, worker, key=worker)

    def idle(self, worker: int, step: int, at_barrier: bool, call: int = 0) -> None:
        """The worker pushes nothing for now, after this step: see bucket.Policy.

        Args:
            call: the number of this call: see Bucket.idle.
        """
        if not self.roster.began:
            self.know(began=True)
        for bucket in self.buckets.values():
            self._act(bucket, bucket.idle, worker, step, at_barrier, call)

    def install(self, bucket: int, weights: torch.Tensor) -> None:
        """Begin with these weights, [bucket] float32."""
        if former := self.buckets.get(bucket):
            del self._locks[former]
        own = self.make_bucket(bucket, weights)
        self._keep(own, bucket)
        self.buckets[bucket] = own

    def restore(self, bucket: int, step: int, state: Mapping[str, torch.Tensor]) -> None:
        """Have a bucket go on after a snapshot: see Bucket.resume."""
        own = self.buckets[bucket]
        self._act(own, own.resume, step, state)

    def optimizer_state(self, bucket: int) -> dict[str, torch.Tensor]:
        own = self.buckets[bucket]
        return self._read(own, own.optimizer_state)

    # What workers add up and write down together

    def sum(self, worker: int, number: int, values: torch.Tensor, as_rows: bool = False) -> Any:
        """A worker's summand of a sum over the workers: see Roster.add."""
        self.heard[worker] = time.monotonic()
        return self._act(self.roster, self.roster.add, worker, number, values, as_rows, key=(number, worker))

    def missing(self, worker: int, number: int, seconds: float) -> tuple[list[int], list[int]]:
        """The workers that a sum still waits for, and those of them that were not heard for so long."""
        missing, now = self._read(self.roster, self.roster.missing, worker, number), time.monotonic()
        return missing, [other for other in missing if now - self.heard.get(other, self._began) > seconds]

    def note(self, slot: int, worker: int, value: str) -> None:
        """See Roster.note."""
        self._act(self.roster, self.roster.note, slot, worker, value)

    def noted(self, slot: int) -> dict[int, str]:
        """What is written down in that slot, by worker."""
        return self.roster.notes.get(slot, {})

    # Shares

    def lease(self, worker: int, step: int, begin: int, end: int) -> int | None:
        """The worker's next share: see Leases. It asks amid the backward pass of the step before, in whose forward
        every answer to the step before that was there.
        """
        self._act(self.leases, self.leases.finished, worker, step - 2)
        return self._act(self.leases, self.leases.lease, worker, step, begin, end, key=worker)

    def await_lease(self, worker: int, step: int) -> Any:
        """See Leases.wait. The worker has every answer."""
        self._act(self.leases, self.leases.finished, worker, step - 1)
        return self._act(self.leases, self.leases.wait, worker, step, key=worker)

    def pause_leases(self) -> None:
        """See Leases.pause."""
        self._act(self.leases, self.leases.pause, self.roster.workers)

    def reassign_leases(self, worker: int) -> None:
        """Others take the shares of a worker that every server has lost."""
        self._act(self.leases, self.leases.lose, worker)

    # Who is there

    def join(self, endpoint: str, pid: int) -> Any:
        """Somebody wants to join, who is reached there and is a process of that number on its host. The first server's
        answer, as soon as they are in: their number and place, and where the others are.
        """
        if not self.arrived:
            raise Failure("nobody can join this job now")
        return self._act(self.roster, self.roster.join, endpoint, pid, key=(pid, endpoint))

    def _place_joiner(self, joined: Joined, pid: int, endpoint: str) -> dict[str, Any] | Failure:
        member, (sums, began, state) = joined
        slowest = min(self._read(bucket, bucket.slowest, state["step"]) for bucket in self.buckets.values())
        try:
            place = self.admit(member, endpoint, slowest, pid)
        except Failure as error:
            return error
        age = time.monotonic() - began
        return {"member": member, "step": slowest, "sums": sums, "age_s": age, "state": state} | place

    def admit(self, member: int, endpoint: str, step: int, pid: int) -> dict[str, Any]:
        """Let a new worker push, after this step.

        Args:
            endpoint: where it is reached.

        Raises:
            Failure: it is lost already.
        """
        if not self.arrived:
            raise Failure("nobody can join this job")
        place = self.arrived(member, endpoint, pid)
        with self._changing:
            self._act(self.roster, self.roster.admit, member)
            for bucket in self.buckets.values():
                self._act(bucket, bucket.join, member, step)
        self.heard[member] = time.monotonic()
        return place

    def open_for_joining(self, sums: int, state: dict[str, Any]) -> None:
        """See Roster.open_for_joining."""
        sizes = state["samples"], state["batch_size"], self.roster.workers
        self._act(self.leases, self.leases.know_sizes, *sizes)
        self._act(self.roster, self.roster.open_for_joining, sums, state, time.monotonic())

    def close(self, why: str) -> None:
        """Nobody can join any more, for this reason."""
        self.arrived = None
        self._act(self.roster, self.roster.close, why)

    def depart(self, worker: int, step: int) -> None:
        """The worker leaves, after this step of its own, all of whose pushes it knows to be answered."""
        self._act(self.leases, self.leases.finished, worker, step)
        self._act(self.roster, self.roster.depart, worker)
        self.departed(worker)

    def lose(self, worker: int) -> None:
        """Go on without a worker. Failure where the others cannot."""
        with self._changing:
            for bucket in self.buckets.values():
                self._act(bucket, bucket.lose, worker)
            self._act(self.roster, self.roster.lose, worker)
        for part, key in list(self.owed):
            own = key[-1] if isinstance(key, tuple) else key
            if own == worker and (future := self.owed.pop((part, key), None)) is not None:
                _settle(future, Failure(GIVEN_UP))
        self.shared.forget(worker)

    def leave(self, worker: int) -> Any:
        """The worker is done; it is answered when all are."""
        self._left.add(worker)
        return self._act(self.roster, self.roster.leave, worker, key=("leave", worker))

    def end(self) -> None:
        """All workers have ended."""
        self._act(self.roster, self.roster.end)

    def have_left(self) -> frozenset[int]:
        """The workers that wait for the end, or have had it."""
        return frozenset(self._left)

    def know(self, **of_server: Any) -> None:
        """See Roster.know."""
        self._act(self.roster, self.roster.know, of_server)

    def returns(self) -> list[dict[str, Any]]:
        """See Roster.returned."""
        return self.roster.returned


def _settle(future: "Future[Any]", value: Any) -> None:
    if isinstance(value, Failure):
        future.set_exception(value)  # type: ignore[arg-type]  # torch's stub takes results alone
    else:
        future.set_result(value)


def _now() -> tuple[int, float]:
    """Which clock this process reads, and what it says: time.perf_counter."""
    return own_clock(), time.perf_counter()


def _traced() -> dict[str, Any]:
    """What this process has recorded: see world.trace."""
    return {"spans": trace.spans, "counts": trace.counts}


def _host() -> dict[str, Any]:
    """What this process's host has to offer, and its `environment`: see world.host."""
    return describe() | {"environment": speed_variables()}
