"""What peers can ask of a server, and the order in which that is done: a part handles the message, what came of it is
written down, answers go out, and what it took is counted.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from hvdtrain.coordination.leases import Leases
from hvdtrain.coordination.roster import Joined, Roster
from hvdtrain.errors import Failure
from hvdtrain.ps.bucket import Bucket
from hvdtrain.ps.journal import LEASES, Journal
from hvdtrain.ps.server_metrics import Load
from hvdtrain.system import trace
from hvdtrain.wire.messages import GIVEN_UP, Answer, Part, Push
from hvdtrain.wire.requests import Calls
from hvdtrain.wire.shared import SharedMemory
from hvdtrain.world.host import describe, own_clock, speed_variables


class Desk:
    """One in a server.

    Args:
        workers: how many there are at the start.
        make_bucket: a bucket from its number and the weights it is given.
        decode: a gradient, [bucket] float32, from the tensors that were sent; None where it is sent as it is.
        load: counts what this server does.
        journal: writes down what parts do, and tells them what they knew.
        shared: by which tensors come and go on one host.
        fixed_shares: see Leases.fixed.

    Attributes:
        calls: what peers can ask for.
        owed: answers that are not there yet, by part and by who waits.
        heard: when a worker last sent something.
        arrived: what is done about whoever joins, by number, endpoint and process; None: nobody can, or not yet: a
            server that comes back looks first who is there.
        departed: what is done about a worker that leaves in order.
    """

    def __init__(
        self, workers: int, make_bucket: Callable[[int, torch.Tensor], Bucket],
        decode: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None, load: Load | None = None,
        journal: Journal | None = None, shared: SharedMemory | None = None, fixed_shares: bool = False,
    ) -> None:  # fmt: skip
        self.make_bucket, self.decode, self.journal = make_bucket, decode, journal
        self.load, self.shared = load or Load(), shared or SharedMemory()
        self.waited: Callable[[str, float], None] = self.load.waited
        self.owed: dict[tuple[Part, Any], Future[Any]] = {}
        self.load.held = lambda: [key for key in list(self.owed) if isinstance(key[0], Bucket)]
        self._locks: dict[Part, threading.Lock] = {}
        self.buckets: dict[int, Bucket] = {}
        self.roster, self.leases = Roster(workers), Leases(workers, fixed_shares)
        self._keep(self.roster, "roster")
        self._keep(self.leases, LEASES)
        self._changing = threading.RLock()  # who is there: whoever joins is in all buckets or in none
        self._began = time.monotonic()
        self.heard: dict[int, float] = {}
        self.arrived: Callable[[int, str, int], dict[str, Any]] | None = None
        self.departed: Callable[[int], None] = lambda worker: None
        self.calls = Calls({
            "push": self.push, "install": self.install, "idle": self.idle, "sum": self.sum, "missing": self.missing,
            "join": self.join, "admit": self.admit, "open_for_joining": self.open_for_joining, "depart": self.depart,
            "lose": self.lose, "noted": lambda slot: self.roster.notes.get(slot, {}),
            "returns": lambda: self.roster.returned, "lives": list, "cost": self.load.cost,
            "now": lambda: (own_clock(), time.perf_counter()),  # which clock, and what it says
            "traced": lambda: {"spans": trace.spans, "counts": trace.counts},
            "host": lambda: describe() | {"environment": speed_variables()},
        })  # fmt: skip
        self.calls |= {name: partial(self.act, self.roster, name) for name in ("note", "leave")}
        self.calls |= {name: partial(self.act, self.leases, name) for name in ("lease", "await_lease", "pause_leases")}
        for name, method in ("pull", "pull"), ("restore", "resume"), ("optimizer_state", "optimizer_state"):
            self.calls[name] = lambda bucket, *message, method=method: self.act(self.buckets[bucket], method, *message)

    def _keep(self, part: Part, name: str | int) -> None:
        self._locks[part] = threading.Lock()
        if self.journal:
            self.journal.keep(part, name)

    def act(self, part: Part, method: str, *message: Any) -> Any:
        """Have a part handle a message. What it answers who asks, or a future of that."""
        lock, result, asked, sent = self._locks[part], None, None, 0
        try:
            if not lock.acquire(blocking=False):
                began = time.perf_counter()
                lock.acquire()
                self.waited(method, time.perf_counter() - began)
            try:
                replies, lines, asked = getattr(part, method)(*message)
                if self.journal:
                    self.journal.commit(part, lines)
                if asked is not None and asked not in replies and (result := self.owed.get((part, asked))) is None:
                    result = self.owed[part, asked] = Future()  # under the part's lock, so that no reply is missed
            finally:
                lock.release()
            if replies:
                answer, sent = self._answer(part, asked, replies)
                result = answer if asked in replies else result
        finally:
            if method == "push" or sent:
                self.load.handled((part, message[0].worker) if method == "push" else None, sent)
        if isinstance(result, Failure):
            raise result
        return result

    def _answer(self, part: Part, asked: Any, replies: Mapping[Any, Any]) -> tuple[Any, int]:
        """Send replies to those who wait. That to who asks, and how many bytes of weights were sent."""
        result, sent = None, 0
        for to, value in replies.items():
            future = self.owed.pop((part, to), None)
            if future is None and to != asked:
                continue  # it asks again, and is answered then
            if isinstance(value, Answer):
                version, staleness, weights, dropped = value
                sent += weights.nbytes
                content = part, version, weights.data_ptr()  # of a version there may be two kinds
                value = Answer(version, staleness, self.shared.put(weights, to, content), dropped)
            elif isinstance(value, Joined):
                value = self._place_joiner(value, *to)
            if to == asked:
                result = value
            if future is not None and isinstance(value, Failure):
                future.set_exception(value)  # type: ignore[arg-type]  # torch's stub takes results alone
            elif future is not None:
                future.set_result(value)
        return result, sent

    def push(self, bucket: int, push: Push) -> "Answer | Future[Answer]":
        """Take a worker's encoded gradient. Its answer, or a future of that where it may not go on yet."""
        worker, part = push.worker, self.buckets[bucket]
        self.heard[worker] = time.monotonic()
        if self.roster.returned:
            # A worker may have had newer weights than are here: a kill has cost the updates in between.
            behind = push.version_read - part.shard.version
            if behind > self.roster.lost_updates.get(bucket, 0):
                self.act(self.roster, "lose_updates", bucket, behind)
        gradient, size = None, 0
        # A push that comes again is not read: its shared memory may have been used for another one since.
        if not part.has(push):
            tensors = [self.shared.get(tensor) for tensor in push.gradient]
            gradient = self.decode(tensors) if self.decode else tensors[0]
            size = sum([tensor.nbytes for tensor in tensors])
        self.load.took((part, worker), size)
        kept = Push(worker, push.step, push.version_read, push.lr, None, push.share)
        return self.act(part, "push", kept, gradient)

    def idle(self, worker: int, step: int, at_barrier: bool, call: int = 0) -> None:
        """The worker pushes nothing for now, after this step: see Bucket.idle."""
        if not self.roster.began:
            self.act(self.roster, "know", {"began": True})
        for bucket in self.buckets.values():
            self.act(bucket, "idle", worker, step, at_barrier, call)

    def install(self, bucket: int, weights: torch.Tensor) -> None:
        """Begin with these weights, [bucket] float32."""
        if former := self.buckets.get(bucket):
            del self._locks[former]
        part = self.make_bucket(bucket, weights)
        self._keep(part, bucket)
        self.buckets[bucket] = part

    def sum(self, worker: int, number: int, values: torch.Tensor, as_rows: bool = False) -> Any:
        """A worker's summand of a sum over the workers: see Roster.add."""
        self.heard[worker] = time.monotonic()
        return self.act(self.roster, "add", worker, number, values, as_rows)

    def missing(self, worker: int, number: int, seconds: float) -> tuple[list[int], list[int]]:
        """The workers that a sum still waits for, and those of them that were not heard for so long."""
        missing, now = self.act(self.roster, "missing", worker, number), time.monotonic()
        return missing, [other for other in missing if now - self.heard.get(other, self._began) > seconds]

    def join(self, endpoint: str, pid: int) -> Any:
        """Somebody wants to join, who is reached there and is a process of that number on its host. The first server's
        answer, as soon as they are in: their number and place, and where the others are.
        """
        if not self.arrived:
            raise Failure("nobody can join this job now")
        return self.act(self.roster, "join", endpoint, pid)

    def _place_joiner(self, joined: Joined, pid: int, endpoint: str) -> dict[str, Any] | Failure:
        member, (sums, began, state) = joined
        steps = [self.act(bucket, "slowest", state["step"]) for bucket in self.buckets.values()]
        slowest = min(steps, default=state["step"])
        try:
            place = self.admit(member, endpoint, slowest, pid)
        except Failure as error:
            return error
        age = time.monotonic() - began
        return {"member": member, "step": slowest, "sums": sums, "age_s": age, "state": state} | place

    def admit(self, member: int, endpoint: str, step: int, pid: int) -> dict[str, Any]:
        """Let a new worker push, after this step, which is reached there. Failure if it is lost already."""
        if not self.arrived:
            raise Failure("nobody can join this job")
        self.heard[member] = time.monotonic()
        place = self.arrived(member, endpoint, pid)
        with self._changing:
            self.act(self.roster, "admit", member)
            for bucket in self.buckets.values():
                self.act(bucket, "join", member, step)
        return place

    def open_for_joining(self, sums: int, state: dict[str, Any]) -> None:
        """See Roster.open_for_joining."""
        self.act(self.leases, "know_sizes", state["samples"], state["batch_size"])
        self.act(self.roster, "open_for_joining", sums, state, time.monotonic())

    def depart(self, worker: int, step: int) -> None:
        """The worker leaves, after this step of its own, all of whose pushes it knows to be answered."""
        self.act(self.leases, "finished", worker, step)
        self.act(self.roster, "depart", worker)
        self.departed(worker)

    def lose(self, worker: int) -> None:
        """Go on without a worker. Failure where the others cannot."""
        with self._changing:
            for bucket in self.buckets.values():
                self.act(bucket, "lose", worker)
            self.act(self.roster, "lose", worker)
        for part, asked in list(self.owed):
            waits = asked[-1] if isinstance(asked, tuple) else asked
            if waits == worker and (future := self.owed.pop((part, asked), None)) is not None:
                future.set_exception(Failure(GIVEN_UP))  # type: ignore[arg-type]
        self.shared.forget(worker)
