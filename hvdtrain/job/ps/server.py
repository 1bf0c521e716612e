"""A server's handlers: what peers can call, and the way of each message through the server.

A message goes to the part of the state that it concerns: a bucket, the roster or the leases. Under
the part's lock the part handles the message, and what came of that is written down. Then the
answers go out: to the peer that called, and to those whose earlier calls were waiting.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec

import torch
from torch.futures import Future

from hvdtrain.base.errors import Failure
from hvdtrain.base.system import trace
from hvdtrain.base.world.host import describe, own_clock, speed_variables
from hvdtrain.job.coordination.leases import Leases
from hvdtrain.job.coordination.roster import Joined, Roster
from hvdtrain.job.ps.bucket import Bucket
from hvdtrain.job.ps.journal import LEASES, Journal
from hvdtrain.job.ps.server_metrics import ServerLoad
from hvdtrain.job.wire.messages import GIVEN_UP, FreshWeights, Part, Push
from hvdtrain.job.wire.requests import Calls
from hvdtrain.job.wire.shared import SharedMemory

P = ParamSpec("P")
Waiter = Any  # the key under which a part answers who waits: a worker, or a tuple with it
Answers = Mapping[Any, Any]  # by waiter
MakeBucket = Callable[[int, torch.Tensor, Mapping[str, Any] | None], Bucket]


class _Reply(NamedTuple):
    """What is sent to one who waits.

    Attributes:
        waiter: the key under which the part answers.
        answer: what is sent, or the Failure that is raised.
        future: the future that the answer completes; None where the call is not over yet.
    """

    waiter: Waiter
    answer: Any
    future: "Future[Any] | None"


class Server:
    """A server as its peers see it. Any thread may call its methods.

    Args:
        workers: the number of workers at the start.
        make_bucket: makes a bucket from its number, its weights, and the optimizer's options where
            this server does not know them: see `install`.
        decode: makes a gradient, [bucket] float32, of the tensors that were sent. None where
            gradients are sent as they are.
        load: counts what this server does.
        journal: writes down what the parts do, and restores what they knew.
        shared: passes tensors to and from peers on this host.
        fixed_shares: see Leases.fixed.

    Attributes:
        calls: what peers can call, by name.
        arrived: called with the number, endpoint and process id of a worker that joins. None where
            nobody can join. A server that comes back sets it when it knows who is there.
        departed: called with a worker that leaves in order.
        pending: answers that are not there yet, by part and waiter.
    """

    def __init__(
        self,
        workers: int,
        make_bucket: MakeBucket,
        decode: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None,
        load: ServerLoad | None = None,
        journal: Journal | None = None,
        shared: SharedMemory | None = None,
        fixed_shares: bool = False,
    ) -> None:
        self.make_bucket = make_bucket
        self.decode = decode
        self.load = load or ServerLoad()
        self.journal = journal or Journal()
        self.shared = shared or SharedMemory()
        self.pending: dict[tuple[Part, Waiter], Future[Any]] = {}
        self.load.held = self._held_pushes
        self._locks: dict[Part, threading.Lock] = {}
        self.buckets: dict[int, Bucket] = {}
        self.roster = Roster(workers)
        self.leases = Leases(workers, fixed_shares)
        self._keep(self.roster, "roster")
        self._keep(self.leases, LEASES)
        # Held while workers join or are lost: a worker is in all buckets or in none.
        self._membership = threading.RLock()
        self.arrived: Callable[[int, str, int], dict[str, Any]] | None = None
        self.departed: Callable[[int], None] = lambda worker: None
        self.waited: Callable[[str, float], None] = self.load.waited
        self.calls = Calls(
            {
                # gradients and weights
                "push": self.push,
                "pull": self.pull,
                "idle": self.idle,
                "install": self.install,
                "restore": self.restore,
                "optimizer_state": self.optimizer_state,
                # what workers agree on
                "sum": self.sum,
                "missing": self.missing,
                "note": self.note,
                "noted": self.noted,
                # shares of the epoch
                "lease": self.lease,
                "await_lease": self.await_lease,
                "pause_leases": self.pause_leases,
                # who is in the job
                "join": self.join,
                "admit": self.admit,
                "open_for_joining": self.open_for_joining,
                "depart": self.depart,
                "leave": self.leave,
                "lose": self.lose,
                "lives": list,
                "returns": self.returns,
                # the process
                "cost": self.load.cost,
                "now": lambda: (own_clock(), time.perf_counter()),  # which clock, and its time
                "traced": lambda: {"spans": trace.spans, "counts": trace.counts},
                "host": lambda: describe() | {"environment": speed_variables()},
            }
        )

    # The way of a message

    def push(self, number: int, push: Push) -> "FreshWeights | Future[FreshWeights]":
        """Takes a worker's push of a bucket.

        Returns:
            The answer, or a future of it where the worker may not go on yet.

        Raises:
            Failure: the worker is lost.
        """
        bucket = self.buckets[number]
        self._count_lost_updates(number, push)
        gradient = self._read_gradient(bucket, push)
        try:
            with self._locked_for_push(bucket):
                # The gate, the policy's decision, and the optimizer's step:
                answers = bucket.push(push.without_tensors(), gradient)
                self._write_down(bucket)
                future = self._wait_for_answer(bucket, push.worker, answers)
                replies = self._take_replies(bucket, push.worker, answers)
            answer = self._send(push.worker, replies)
        finally:
            self.load.handled((bucket, push.worker))
        return answer if future is None else future

    def handle(
        self,
        part: Part,
        method: Callable[P, Answers | None],
        *message: P.args,
        **named: P.kwargs,
    ) -> None:
        """Has a part handle a message, and sends the answers that result."""
        self.handle_for(None, part, method, *message, **named)

    def handle_for(
        self,
        caller: Waiter,
        part: Part,
        method: Callable[P, Answers | None],
        *message: P.args,
        **named: P.kwargs,
    ) -> Any:
        """Has a part handle a message whose caller waits for an answer.

        Args:
            caller: the key under which the part answers the caller; None where nobody waits.
            part: the part of this server.
            method: a method of the part; the rest are its arguments.

        Returns:
            The answer for the caller, or a future of it where it is not there yet.

        Raises:
            Failure: the message is refused.
        """
        with self._locks[part]:
            answers = method(*message, **named) or {}
            self._write_down(part)
            future = self._wait_for_answer(part, caller, answers)
            replies = self._take_replies(part, caller, answers)
        answer = self._send(caller, replies)
        return answer if future is None else future

    @contextmanager
    def _locked_for_push(self, bucket: Bucket) -> Iterator[None]:
        """Holds a bucket's lock. The time that the push waits for the lock is counted."""
        lock = self._locks[bucket]
        if not lock.acquire(blocking=False):
            began = time.perf_counter()
            lock.acquire()
            self.load.waited("push", time.perf_counter() - began)
        try:
            yield
        finally:
            lock.release()

    def _write_down(self, part: Part) -> None:
        """Writes the part's ledger lines, and saves its state for after a kill.

        Nobody is answered before that: what a peer was told survives a kill.
        """
        self.journal.commit(part, part.take_lines())

    def _wait_for_answer(
        self, part: Part, caller: Waiter, answers: Answers
    ) -> "Future[Any] | None":
        """Returns a future where the caller's answer is not there yet.

        Called under the part's lock, so that no later message answers before the future is there.
        """
        if caller is None or caller in answers:
            return None
        return self.pending.setdefault((part, caller), Future())

    def _take_replies(self, part: Part, caller: Waiter, answers: Answers) -> list[_Reply]:
        """Returns what is sent to the caller and to those who waited.

        Called under the part's lock, so that shared memory knows who reads the weights before a
        later message changes them.
        """
        replies = []
        for waiter, answer in answers.items():
            future = self.pending.pop((part, waiter), None)
            if future is None and waiter != caller:
                continue  # its call was lost with a server: it calls again, and is answered then
            if isinstance(answer, FreshWeights):
                answer = self._share(waiter, answer)
            replies.append(_Reply(waiter, answer, future))
        return replies

    def _send(self, caller: Waiter, replies: Sequence[_Reply]) -> Any:
        """Completes the futures of those who waited; returns the caller's answer."""
        answer_of_caller = None
        for waiter, answer, future in replies:
            if isinstance(answer, Joined):
                answer = self._place_joiner(answer, *waiter)
            if future is not None:
                _complete(future, answer)
            if waiter == caller:
                answer_of_caller = answer
        if isinstance(answer_of_caller, Failure):
            raise answer_of_caller
        return answer_of_caller

    def _share(self, worker: int, answer: FreshWeights) -> FreshWeights:
        """Puts the weights of an answer into shared memory, where there is any."""
        version, staleness, weights, dropped = answer
        self.load.sent(weights.nbytes)
        shared = self.shared.put(weights, worker)
        return FreshWeights(version, staleness, shared, dropped)

    # Gradients and weights

    def _count_lost_updates(self, number: int, push: Push) -> None:
        """Counts how many updates a kill of this server has cost.

        A worker may have newer weights than came back.
        """
        if not self.roster.returned:
            return
        behind = push.version_read - self.buckets[number].weights.version
        if behind > self.roster.lost_updates.get(number, 0):
            self.handle(self.roster, self.roster.lose_updates, number, behind)

    def _read_gradient(self, bucket: Bucket, push: Push) -> torch.Tensor | None:
        """Returns the decoded gradient of a push, [bucket] float32.

        None for a push that comes again: its shared memory may have been used for another since.
        """
        key = (bucket, push.worker)
        if bucket.has_had(push):
            self.load.took(key, 0)
            return None
        tensors = [self.shared.get(tensor) for tensor in push.gradient]
        gradient = self.decode(tensors) if self.decode else tensors[0]
        self.load.took(key, sum([tensor.nbytes for tensor in tensors]))
        return gradient

    def _held_pushes(self) -> list[tuple[Part, Waiter]]:
        return [key for key in list(self.pending) if isinstance(key[0], Bucket)]

    def pull(self, number: int, worker: int) -> FreshWeights:
        """Returns a bucket's weights as they are: see Bucket.pull."""
        bucket = self.buckets[number]
        with self._locks[bucket]:
            answer = bucket.pull(worker)
            self._write_down(bucket)
            return self._share(worker, answer)

    def idle(self, worker: int, step: int, at_barrier: bool, call: int = 0) -> None:
        """Takes note that a worker pushes nothing for now, after this step: see Bucket.idle."""
        if not self.roster.began:
            self.handle(self.roster, self.roster.know, {"began": True})
        for bucket in self.buckets.values():
            self.handle(bucket, bucket.idle, worker, step, at_barrier, call)

    def install(
        self, number: int, weights: torch.Tensor, optimizer: Mapping[str, Any] | None = None
    ) -> None:
        """Begins with these weights of a bucket, [bucket] float32.

        Args:
            optimizer: numerics.optimizers.OPTIONS by name; None: use this server's configuration.
        """
        former = self.buckets.get(number)
        if former:
            del self._locks[former]
        bucket = self.make_bucket(number, weights, optimizer)
        self._keep(bucket, number)
        self.buckets[number] = bucket

    def restore(self, number: int, step: int, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on after this step of a snapshot: see Bucket.resume."""
        bucket = self.buckets[number]
        self.handle(bucket, bucket.resume, step, state)

    def optimizer_state(self, number: int) -> dict[str, torch.Tensor]:
        """Returns the state of a bucket's optimizer."""
        bucket = self.buckets[number]
        with self._locks[bucket]:
            return bucket.optimizer_state()

    def _keep(self, part: Part, name: str | int) -> None:
        self._locks[part] = threading.Lock()
        self.journal.keep(part, name)

    # What workers agree on

    def sum(
        self, worker: int, number: int, values: torch.Tensor, as_rows: bool = False
    ) -> "torch.Tensor | Future[torch.Tensor]":
        """Takes a worker's summand of a sum over the workers: see Roster.add."""
        waiter = (number, worker)
        add = self.roster.add
        return self.handle_for(waiter, self.roster, add, worker, number, values, as_rows)

    def missing(self, worker: int, number: int) -> list[int]:
        """Returns the workers that a sum waits for: see Roster.missing."""
        with self._locks[self.roster]:
            return self.roster.missing(worker, number)

    def note(self, slot: int, worker: int, value: str) -> None:
        """Keeps a worker's note for the worker that leads: see Roster.note."""
        self.handle(self.roster, self.roster.note, slot, worker, value)

    def noted(self, slot: int) -> dict[int, str]:
        """Returns the notes in this slot, by worker."""
        return self.roster.notes.get(slot, {})

    # Shares of the epoch

    def lease(self, worker: int, step: int, begin: int, end: int) -> int | None:
        """Returns the share for a worker's step: see Leases.lease."""
        lease = self.leases.lease
        return self.handle_for(worker, self.leases, lease, worker, step, begin, end)

    def await_lease(self, worker: int, step: int) -> Any:
        """Returns a share that another worker has lost, or a future: see Leases.await_lease."""
        return self.handle_for(worker, self.leases, self.leases.await_lease, worker, step)

    def pause_leases(self) -> None:
        """Ends the round early: see Leases.pause_leases."""
        self.handle(self.leases, self.leases.pause_leases)

    # Who is in the job

    def join(self, endpoint: str, pid: int) -> Any:
        """Lets a worker join, as soon as the others train.

        Args:
            endpoint: where the worker is reached.
            pid: its process on its host.

        Returns:
            The worker's number and place, and where the others are; or a future of that.

        Raises:
            Failure: nobody can join.
        """
        if not self.arrived:
            raise Failure("nobody can join this job now")
        return self.handle_for((pid, endpoint), self.roster, self.roster.join, endpoint, pid)

    def _place_joiner(self, joined: Joined, pid: int, endpoint: str) -> dict[str, Any] | Failure:
        """Returns what a worker that has joined is told."""
        point = joined.point
        slowest = point.state["step"]
        steps = [self._slowest(bucket, slowest) for bucket in self.buckets.values()]
        step = min(steps, default=slowest)
        try:
            place = self.admit(joined.member, endpoint, step, pid)
        except Failure as error:
            return error
        told = {
            "member": joined.member,
            "step": step,
            "sums": point.sums,
            "age_s": time.monotonic() - point.began,
            "state": point.state,
        }
        return told | place

    def _slowest(self, bucket: Bucket, default: int) -> int:
        with self._locks[bucket]:
            return bucket.slowest(default)

    def admit(self, member: int, endpoint: str, step: int, pid: int) -> dict[str, Any]:
        """Lets a new worker push, after this step.

        Args:
            member: the worker's number.
            endpoint: where the worker is reached.
            step: the step that the worker goes on after.
            pid: its process on its host.

        Returns:
            The worker's place; empty where another server numbers them.

        Raises:
            Failure: nobody can join, or the worker is lost already.
        """
        if not self.arrived:
            raise Failure("nobody can join this job")
        place = self.arrived(member, endpoint, pid)
        with self._membership:
            self.handle(self.roster, self.roster.admit, member)
            for bucket in self.buckets.values():
                self.handle(bucket, bucket.join, member, step)
        return place

    def open_for_joining(self, sums: int, state: dict[str, Any]) -> None:
        """Lets workers join until the next sum: see Roster.open_for_joining."""
        self.handle(self.leases, self.leases.know_sizes, state["sizes"])
        now = time.monotonic()
        self.handle(self.roster, self.roster.open_for_joining, sums, state, now)

    def depart(self, worker: int, step: int) -> None:
        """Lets a worker leave after this step; all its pushes were answered."""
        self.handle(self.leases, self.leases.finished, worker, step)
        self.handle(self.roster, self.roster.depart, worker)
        self.departed(worker)

    def leave(self, worker: int) -> "Future[None] | None":
        """Takes note that a worker is done; it is answered when all are."""
        return self.handle_for(("leave", worker), self.roster, self.roster.leave, worker)

    def lose(self, worker: int) -> None:
        """Goes on without a worker.

        Raises:
            Failure: the others cannot go on.
        """
        with self._membership:
            for bucket in self.buckets.values():
                self.handle(bucket, bucket.lose, worker)
            self.handle(self.roster, self.roster.lose, worker)
        for key in list(self.pending):
            _, waiter = key
            waiting_worker = waiter[-1] if isinstance(waiter, tuple) else waiter
            if waiting_worker != worker:
                continue
            future = self.pending.pop(key, None)
            if future is not None:
                _complete(future, Failure(GIVEN_UP))
        self.shared.forget(worker)

    def returns(self) -> list[dict[str, Any]]:
        """Returns when this server was killed and came back: see runs.schema.Return."""
        return self.roster.returned


def _complete(future: "Future[Any]", answer: Any) -> None:
    if isinstance(answer, Failure):
        future.set_exception(answer)  # type: ignore[arg-type]  # torch's stub takes results alone
    else:
        future.set_result(answer)
