"""One bucket of the weights on its server. It knows nothing of processes or networks: drive it with plain calls."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch

from hvdtrain.errors import Failure
from hvdtrain.numerics.optimizers import restore_state, set_lr, state_of
from hvdtrain.ps.crash_memory import SavedState
from hvdtrain.ps.membership import GIVEN_UP
from hvdtrain.ps.messages import NO_SHARE, Answer, Applied, Push

# A worker finishes the lease of a step while it is in the backward pass of the next: so many of its last pushes belong
# to leases that are open.
UNCONFIRMED = 2
Reply = tuple[int, Answer]  # the worker, and its answer
# What is saved of a bucket beside its tensors.
_SAVED = ("version", "lines", "_last", "_lost", "_shares", "_sent", "_taken", "_idled", "_changes", "_pushes")
_STATE = "optimizer."  # before the names of the optimizer's tensors, there


def no_ledger(applied: Applied) -> None:
    """The ledger of a run that is not recorded."""


class Policy(Protocol):
    """When pushes are applied and workers go on: the difference between the parameter-server modes.

    A policy is of one bucket, which calls it while it is locked.
    """

    def begin(self, step: int) -> None:
        """Every worker has taken this step, of a snapshot, and none has pushed here yet."""

    def accept(self, bucket: "Bucket", push: Push) -> list[Reply]:
        """Take a push of a step not seen before; return the replies to all workers that may go on now."""

    def flush(self, bucket: "Bucket") -> None:
        """Take a step with the pushes that wait for others to make one, if there are any."""

    def idle(self, bucket: "Bucket", worker: int, step: int, at_barrier: bool) -> list[Reply]:
        """The worker evaluates, or is done, after this step: no other waits for it until it pushes again, or, if it is
        at a barrier, until all are.

        Its push of that step may come later than this, on another thread.
        """

    def pulled(self, bucket: "Bucket", worker: int) -> None:
        """The worker is given the weights as they are."""

    def join(self, bucket: "Bucket", worker: int, step: int) -> None:
        """One more worker is there, as if it had pushed this step.

        Raises:
            Failure: this mode has as many workers as it began with.
        """

    def lose(self, bucket: "Bucket", worker: int) -> list[Reply]:
        """The worker is gone for good: no other waits for it any more.

        Raises:
            Failure: the others cannot go on without it.
        """


class RecoverablePolicy(Policy, Protocol):
    """A policy whose buckets are saved: see ps.crash_memory."""

    def waits(self, worker: int) -> bool:
        """Whether a push of this worker will be answered later."""

    def state(self) -> tuple[Any, torch.Tensor | None]:
        """What it knows: of plain types, and the sum of gradients that no step was made of yet."""

    def restore(self, plain: Any, summed: torch.Tensor | None) -> None:
        """Know this, of which the tensor is its own from now on."""


class Bucket:
    """A contiguous range of the flat weights with its optimizer's state.

    Args:
        weights: [bucket] float32; kept, not copied.
        make_optimizer: given the one parameter, its optimizer.
        policy: when pushes are applied.
        ledger: called with every push that was applied or dropped, in order.
        saved: has all of this as of the last answer, for whoever comes back in place of a server that was killed.
        queued: called with the seconds that a push waited for whoever else was at this bucket.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        policy: Policy,
        ledger: Callable[[Applied], None] = no_ledger,
        saved: SavedState | None = None,
        queued: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.weights = weights
        self._sent_as = weights.detach()  # the same memory, for whoever is sent it: see _move
        self.optimizer = make_optimizer([self.weights])
        self.policy = policy
        self.version = 0
        self.lines = 0  # of the ledger
        self._ledger, self._saved, self._queued = ledger, saved, queued
        self._changes, self._pushes = 0, 0  # changes of the weights and the optimizer's state; pushes that were taken
        self._ahead: torch.Tensor | None = None  # what workers are sent in place of the weights; see apply
        self._last: dict[int, int] = {}  # worker -> the step of its last push
        self._reading: set[int] = set()  # workers that were sent this memory, which may still be on its way
        self._lost: set[int] = set()  # workers
        self._shares: dict[int, deque[int]] = {}  # worker -> the leased shares of its last pushes
        self._sent: dict[int, int] = {}  # worker -> the version that answered its last push
        self._taken: set[int] = set()  # shares of workers that were lost before they knew that this bucket has them
        self._idled: dict[int, int] = {}  # worker -> the number of its last call of idle
        self._lock = threading.Lock()
        if saved and saved.plain is not None:
            self._restore(saved.plain, saved.tensors())
        else:
            self._save()

    def ledger(self, applied: Applied) -> None:
        """Write down what became of a push."""
        self.lines += 1
        self._ledger(applied)

    def has(self, push: Push) -> bool:
        """Whether it was here before: its worker has not heard of that, or still waits."""
        return push.step <= self._last.get(push.worker, 0)

    def push(self, push: Push) -> list[Reply]:
        """Hand in a gradient; returns the replies to all workers that may go on now, its own among them or later.

        A push of a step that was pushed before is dropped: that one is applied, and answered. Where this server may
        come back, the answer may have been lost, and is given again, unless the worker is to wait.

        Raises:
            Failure: the worker had been given up.
        """
        # What a context manager like _saving takes is much beside a small push, and so is a look at the clock.
        if not self._lock.acquire(blocking=False):
            began = time.perf_counter()
            self._lock.acquire()
            self._queued(time.perf_counter() - began)
        try:
            replies = self._take(push)
            self._save()
        finally:
            self._lock.release()
        return replies

    def _take(self, push: Push) -> list[Reply]:
        worker = push.worker
        self._refuse_lost(worker)
        if self.has(push):
            waits = self._saved is None or cast(RecoverablePolicy, self.policy).waits(worker)
            return [] if waits else [self.reply(push, 0)]
        self._last[worker] = push.step
        self._pushes += 1
        self._sent.pop(worker, None)
        self._reading.discard(worker)  # it has had its answer, or it could not have computed this
        if push.share in self._taken:
            self.drop(push)
            return self.policy.accept(self, push.with_gradient(None))
        if push.share != NO_SHARE:
            self._shares.setdefault(worker, deque(maxlen=UNCONFIRMED)).append(push.share)
        return self.policy.accept(self, push)

    def pull(self, worker: int) -> Answer:
        """The weights as they are, for a worker that pushes nothing before it has them."""
        with self._saving():
            self._refuse_lost(worker)
            return self._as_they_are(worker)

    def answer(self, worker: int, staleness: int = 0, dropped: int = 0) -> Answer:
        """What a worker is sent in answer to a push, while the bucket is locked or nobody else uses it."""
        self._sent[worker] = self.version
        if self._ahead is not None:
            return Answer(self.version, staleness, self._ahead, dropped)
        return self._as_they_are(worker, staleness, dropped)

    def _as_they_are(self, worker: int, staleness: int = 0, dropped: int = 0) -> Answer:
        self._sent[worker] = self.version
        self._reading.add(worker)
        self.policy.pulled(self, worker)
        return Answer(self.version, staleness, self._sent_as, dropped)

    def idle(self, worker: int, step: int, at_barrier: bool, number: int = 0) -> list[Reply]:
        """The worker pushes nothing for now, after this step; returns the replies to workers that waited for it.

        Args:
            number: of this call among those of the worker, from 1: one that comes again changes nothing; 0: it does
                not.
        """
        with self._saving():
            self._refuse_lost(worker)
            if 0 < number <= self._idled.get(worker, 0):
                return []
            self._idled[worker] = number
            return self.policy.idle(self, worker, step, at_barrier)

    def slowest(self, otherwise: int) -> int:
        """The least step of the last pushes of those that are there; `otherwise` where none has pushed."""
        with self._lock:
            return min((step for worker, step in self._last.items() if worker not in self._lost), default=otherwise)

    def join(self, worker: int, step: int) -> None:
        """One more worker is there, whose next step comes after this one.

        Raises:
            Failure: it was lost meanwhile, or this mode lets nobody join.
        """
        with self._saving():
            self._refuse_lost(worker)
            self._last[worker] = step
            self.policy.join(self, worker, step)

    def lose(self, worker: int) -> list[Reply]:
        """The worker is gone for good; returns the replies to workers that waited for it. What it has pushed here
        counts: the shares that it had not finished are leased again, and whoever pushes one of these then is answered,
        and the push dropped. So each share counts once in each bucket, whichever of them a push had reached.

        Raises:
            Failure: the others cannot go on without it.
        """
        with self._saving():
            if worker in self._lost:
                return []
            self._lost.add(worker)
            self._reading.discard(worker)
            self._taken.update(self._shares.pop(worker, ()))
            if (read := self._sent.pop(worker, None)) is not None:  # other buckets may have its next push
                self.ledger(Applied(worker, self._last.get(worker, 0) + 1, read, None))
            return self.policy.lose(self, worker)

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        """Go on as after this step of every worker, with the optimizer's state as numerics.optimizers.state_of gives
        it.
        """
        with self._saving():
            restore_state(self.optimizer, [self.weights], state)
            self._ahead, self._changes = None, self._changes + 1
            self.policy.begin(step)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state of this bucket, as restore takes it."""
        with self._lock:
            return state_of(self.optimizer, [self.weights])

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Locked; what the block has done is saved when it ends, before anybody is answered."""
        with self._lock:
            yield
            self._save()

    def _save(self) -> None:
        if self._saved is None:
            return
        plain, summed = cast(RecoverablePolicy, self.policy).state()
        own = {name: getattr(self, name) for name in _SAVED}
        state = self.optimizer.state.get(self.weights, {})
        tensors = {"weights": self.weights.detach(), "ahead": self._ahead}
        tensors |= {_STATE + name: value for name, value in state.items()}
        stamped = {name: (tensor, self._changes) for name, tensor in tensors.items()}
        self._saved.save((own, plain), stamped | {"sum": (summed, self._pushes)})

    def _restore(self, plain: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Be as the bucket was that was saved so."""
        own, of_policy = plain
        for name in _SAVED:
            setattr(self, name, own[name])
        self._move(tensors["weights"])
        state = {name.removeprefix(_STATE): value for name, value in tensors.items() if name.startswith(_STATE)}
        if state:
            self.optimizer.state[self.weights] = state
        self._ahead = tensors.get("ahead")
        cast(RecoverablePolicy, self.policy).restore(of_policy, tensors.get("sum"))

    def _move(self, weights: torch.Tensor) -> None:
        """Have the weights in this memory from now on, and leave the one they were in to those who read it."""
        self.weights.data = weights
        self._sent_as = self.weights.detach()

    def _refuse_lost(self, worker: int) -> None:
        if worker in self._lost:
            raise Failure(GIVEN_UP)

    # For policies, while the bucket is locked.

    def apply(self, gradient: torch.Tensor, lr: float, *made_of: Push, look_ahead: float = 0.0) -> None:
        """One optimizer step with a gradient that was made of these pushes.

        Args:
            look_ahead: workers are sent the weights as they would be after so many more steps like this one.
        """
        before = self.weights.clone() if look_ahead else None
        if self._reading:  # leave them the memory that they are reading
            self._move(self.weights.clone())
            self._reading = set()
        set_lr(self.optimizer, lr)
        self.weights.grad = gradient
        self.optimizer.step()
        self.weights.grad = None
        self._ahead = before.lerp_(self.weights, 1 + look_ahead) if before is not None else None
        self.version += 1
        self._changes += 1
        if self._ledger is not no_ledger:  # as a rule nobody reads them
            for push in made_of:
                self.ledger(Applied(push.worker, push.step, push.version_read, self.version))

    def drop(self, push: Push) -> None:
        """Leave out a push."""
        self.ledger(Applied(push.worker, push.step, push.version_read, None))

    def reply(self, push: Push, staleness: int, dropped: int = 0) -> Reply:
        """Let the push's worker go on with the weights as they are, or ahead of that: see apply.

        Args:
            dropped: see Answer.
        """
        return push.worker, self.answer(push.worker, staleness, dropped)
