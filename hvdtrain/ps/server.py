"""What a server process holds, and what workers can ask of it: a message, a method, an answer."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.numerics.split import samples_of_share
from hvdtrain.ps.bucket import Bucket, Reply
from hvdtrain.ps.crash_memory import CrashMemory
from hvdtrain.ps.leases import Leases
from hvdtrain.ps.membership import GIVEN_UP, JoinPoint, Membership
from hvdtrain.ps.messages import Answer, Push
from hvdtrain.ps.server_metrics import Load
from hvdtrain.ps.shared import SharedMemory
from hvdtrain.world import trace
from hvdtrain.world.host import describe, own_clock, speed_variables

_nbytes = attrgetter("nbytes")
_SAVED = ("notes", "departed_workers", "began", "is_over", "own", "others", "shares_memory", "returned", "_lost")


class Server:
    """The buckets of one server. Workers call its methods through ps.wire, by name.

    Args:
        make_bucket: a bucket from its number and the weights it is given.
        decode: a gradient, [bucket] float32, from the tensors that were sent.
        membership: the workers that are there.
        leases: which worker has which share, on the first server.
        load: counts what this server does.
        rank: this process's.
        shared: by which tensors come and go on one host.
        memory: has what all of these know as of the last answer, for whoever comes back in place of a server that was
            killed.

    Attributes:
        notes: what workers last wrote down for the one that leads: by slot, 0 or 1, and by worker.
        departed_workers: those that have left in order, while the others go on.
        began: whether workers have the first weights.
        is_over: whether all workers have ended.
        shares_memory: whether tensors go by memory that this server's host shares.
        returned: how often this server was killed and came back: see runs.schema.Return.
        own, others: where this server is reached, and the others, by the number that they are called by.
    """

    def __init__(
        self,
        make_bucket: Callable[[int, torch.Tensor], Bucket],
        decode: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        membership: Membership,
        leases: Leases,
        load: Load,
        rank: int = 0,
        shared: SharedMemory | None = None,
        memory: CrashMemory | None = None,
    ) -> None:
        self.make_bucket, self.decode = make_bucket, decode
        self.membership, self.leases, self.load, self.rank = membership, leases, load, rank
        self.shared = shared or SharedMemory()
        self.buckets: dict[int, Bucket] = {}
        # What a WorkerMonitor sets: what the first server knows of each life, and what is done about whoever arrives.
        self.lives: Callable[[], list[dict[str, Any]]] = list
        self.lets_in = False
        self.arrived: Callable[[int, str, int], dict[str, Any]] = self._let_nobody_in
        self.departed: Callable[[int], None] = lambda worker: None  # it leaves in order, and the others go on
        self._lost: set[int] = set()
        self._changing = threading.Lock()  # who is there: whoever joins is in all buckets or in none
        self.open: dict[tuple[int, int], Future[Answer]] = {}  # (bucket, worker) -> what its push is answered with
        self.notes: dict[int, dict[int, str]] = {}
        self.departed_workers: set[int] = set()
        self.began = self.is_over = self.shares_memory = False
        self.own = ""
        self.others: dict[int, str] = {}
        self.returned: list[dict[str, Any]] = []
        self._leaving: dict[int, Future[None]] = {}
        self._behind: dict[int, int] = {}  # by bucket, updates that a kill has cost
        self._saved = memory.state_of("server") if memory else None
        self._plain = threading.Lock()
        if self._saved and self._saved.plain is not None:
            for name, value in self._saved.plain.items():
                setattr(self, name, value)
            if membership.state is not None:
                self._know_samples(membership.state)

    def push(self, bucket: int, push: Push) -> "Answer | Future[Answer]":
        """Take a worker's encoded gradient. Its answer, or a future of that where it may not go on yet."""
        worker, own = push.worker, self.buckets[bucket]
        self.membership.heard(worker)
        if self.returned:
            self._count_lost(bucket, push)
        # A push that comes again is not read: its shared memory may have been used for another one since.
        sent = None if own.has(push) else list(map(self.shared.get, push.gradient))
        answer: Future[Answer] = Future()
        self.open[bucket, worker] = answer
        began = time.perf_counter() if trace.is_on else 0.0
        self.load.took(worker, bucket, sum(map(_nbytes, sent or ())))
        replies = None
        try:
            replies = own.push(push.with_gradient(None if sent is None else self.decode(sent)))
        finally:
            self.load.handled(worker, bucket, is_refused=replies is None)
            if replies is None:
                self.open.pop((bucket, worker), None)
        if trace.is_on and trace.records(push.step_of_job(self.membership.workers)):
            flow = trace.flow_of(push.step, worker, self.rank, bucket)
            name = f"apply bucket {bucket} of worker {worker}"
            trace.span(trace.APPLY, name, began, time.perf_counter(), flow)
            trace.count("queue", len(self.open))
        return self._answer(bucket, replies, answer) or answer

    def pull(self, bucket: int, worker: int) -> Answer:
        """A bucket as it is. The worker pushes nothing before it has it."""
        return self._sent(worker, bucket, self.buckets[bucket].pull(worker))

    def idle(self, worker: int, step: int, at_barrier: bool, call: int = 0) -> None:
        """The worker pushes nothing for now, after this step: see bucket.Policy.

        Args:
            call: the number of this call: see Bucket.idle.
        """
        if not self.began:
            with self.saving():
                self.began = True
        for number, bucket in self.buckets.items():
            self._answer(number, bucket.idle(worker, step, at_barrier, call))

    def lose(self, worker: int) -> None:
        """Go on without a worker. Failure where the others cannot."""
        with self._changing:
            with self.saving():
                self._lost.add(worker)
            for number, bucket in self.buckets.items():
                self._answer(number, bucket.lose(worker))
                self.open.pop((number, worker), None)
        self.membership.lose(worker)
        self.load.lost(worker)
        self.shared.forget(worker)

    def reassign_leases(self, worker: int) -> None:
        """Others take the shares of a worker that every server has lost."""
        self.leases.lose(worker)

    def join(self, endpoint: str, pid: int) -> "Future[dict[str, Any]]":
        """Somebody wants to join, who is reached there and is a process of that number on its host. The first server's
        answer, as soon as they are in: their number and place, and where the others are.

        Raises:
            Failure: nobody can, or not yet: a server that comes back looks first who is there.
        """
        if not self.lets_in:
            raise Failure("nobody can join this job now")

        place: Future[dict[str, Any]] = Future()

        def admitted(future: "Future[tuple[int, JoinPoint]]") -> None:
            try:
                place.set_result(self._let_in(*future.value(), endpoint, pid))
            except Failure as error:
                place.set_exception(error)  # type: ignore[arg-type]  # torch's stub takes results alone

        self.membership.join().add_done_callback(admitted)
        return place

    def _let_in(self, member: int, now: JoinPoint, endpoint: str, pid: int) -> dict[str, Any]:
        slowest = min(bucket.slowest(now.state["step"]) for bucket in self.buckets.values())
        place = self.admit(member, endpoint, slowest, pid)
        age = time.monotonic() - now.began
        return {"member": member, "step": slowest, "sums": now.sums, "age_s": age, "state": now.state} | place

    def admit(self, member: int, endpoint: str, step: int, pid: int) -> dict[str, Any]:
        """Let a new worker push, after this step.

        Args:
            endpoint: where it is reached.

        Raises:
            Failure: it is lost already.
        """
        place = self.arrived(member, endpoint, pid)
        with self._changing:
            if member in self._lost:
                raise Failure(GIVEN_UP)
            self.membership.admit(member)
            for bucket in self.buckets.values():
                bucket.join(member, step)
        return place

    def depart(self, worker: int, step: int) -> None:
        """The worker leaves, after this step of its own, all of whose pushes it knows to be answered."""
        self.leases.finished(worker, step)
        with self.saving():
            self.departed_workers.add(worker)
        self.departed(worker)

    def open_for_joining(self, sums: int, state: dict[str, Any]) -> None:
        """See Membership.open_for_joining."""
        self._know_samples(state)
        self.membership.open_for_joining(sums, state)

    def _know_samples(self, state: Mapping[str, Any]) -> None:
        data, batch, workers = state["samples"], state["batch_size"], self.membership.workers
        self.leases.samples_of = partial(samples_of_share, samples=data, batch_size=batch, workers=workers)

    def _let_nobody_in(self, member: int, endpoint: str, pid: int) -> dict[str, Any]:
        raise Failure("nobody can join this job")

    def _count_lost(self, bucket: int, push: Push) -> None:
        """Note it where a worker has had a newer version of the weights than are here: there is none, or a kill has
        cost the updates in between.
        """
        if (behind := push.version_read - self.buckets[bucket].version) > self._behind.get(bucket, 0):
            with self.saving():
                self._behind[bucket] = behind
                self.returned[-1]["lost_updates"] = sum(self._behind.values())

    def returns(self) -> list[dict[str, Any]]:
        """See `returned`."""
        return self.returned

    def _answer(self, bucket: int, replies: list[Reply], own: "Future[Answer] | None" = None) -> Answer | None:
        """Answer the workers that may go on. What `own` would hold is returned: its caller needs no future."""
        found = None
        for worker, answer in replies:
            future = self.open.pop((bucket, worker), None)  # none: the push comes again, and is answered then
            if future and future is own:
                found = self._sent(worker, bucket, answer)
            elif future:
                future.set_result(self._sent(worker, bucket, answer))
        return found

    def _sent(self, worker: int, bucket: int, answer: Answer) -> Answer:
        self.load.answered(worker, bucket, answer)
        weights = answer.weights  # of a version there may be two kinds: see Bucket.answer
        sent = self.shared.put(weights, worker, (self.buckets[bucket], answer.version, weights.data_ptr()))
        return answer if sent is weights else answer._replace(weights=sent)

    def sum(self, worker: int, number: int, values: torch.Tensor, as_rows: bool = False) -> "Future[torch.Tensor]":
        """A worker's summand of a sum over the workers: see Membership.add."""
        return self.membership.add(worker, number, values, as_rows)

    def missing(self, worker: int, number: int, seconds: float) -> tuple[list[int], list[int]]:
        """The workers that a sum still waits for, and those of them that were not heard for so long."""
        missing = self.membership.missing(worker, number)
        return missing, self.membership.silent(missing, seconds)

    def lease(self, worker: int, step: int, begin: int, end: int) -> int:
        """The worker's next share: see Leases. It asks amid the backward pass of the step before, in whose forward
        every answer to the step before that was there.
        """
        self.leases.finished(worker, step - 2)
        return self.leases.lease(worker, step, begin, end)

    def await_lease(self, worker: int, step: int) -> "Future[tuple[int, int]]":
        """See Leases.wait. The worker has every answer."""
        self.leases.finished(worker, step - 1)
        return self.leases.wait(worker, step)

    def pause_leases(self) -> None:
        """See Leases.pause."""
        self.leases.pause(self.membership.workers)

    def install(self, bucket: int, weights: torch.Tensor) -> None:
        """Begin with these weights, [bucket] float32."""
        self.buckets[bucket] = self.make_bucket(bucket, weights)

    def restore(self, bucket: int, step: int, state: Mapping[str, torch.Tensor]) -> None:
        """Have a bucket go on after a snapshot: see Bucket.restore."""
        self.buckets[bucket].restore(step, state)

    def note(self, slot: int, worker: int, value: str) -> None:
        """Write down what a worker has for the one that leads, in place of what it had in that slot."""
        with self.saving():
            self.notes.setdefault(slot, {})[worker] = value

    def noted(self, slot: int) -> dict[int, str]:
        """What is written down in that slot, by worker."""
        return self.notes.get(slot, {})

    def leave(self, worker: int) -> "Future[None]":
        """The worker is done; the future is when all are."""
        future: Future[None] = Future()
        with self._plain:
            is_over, self._leaving[worker] = self.is_over, future
        if is_over:
            future.set_result(None)
        return future

    def end(self) -> None:
        """All workers have ended."""
        with self.saving():
            self.is_over = True
        for future in list(self._leaving.values()):
            future.set_result(None)

    def have_left(self) -> frozenset[int]:
        """The workers that wait for the end, or have had it."""
        return frozenset(self._leaving)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What the block changes of the attributes in _SAVED outlives this process when it ends."""
        with self._plain:
            yield
            if self._saved:
                self._saved.save({name: getattr(self, name) for name in _SAVED}, {})

    def optimizer_state(self, bucket: int) -> dict[str, torch.Tensor]:
        return self.buckets[bucket].optimizer_state()

    def cost(self) -> dict[str, Any]:
        """See Load.cost."""
        return self.load.cost()

    def now(self) -> tuple[int, float]:
        """Which clock this process reads, and what it says: time.perf_counter."""
        return own_clock(), time.perf_counter()

    def traced(self) -> dict[str, Any]:
        """What this process has recorded: see world.trace."""
        return {"spans": trace.spans, "counts": trace.counts}

    def host(self) -> dict[str, Any]:
        """What this process's host has to offer, and its `environment`: see world.host."""
        return describe() | {"environment": speed_variables()}
