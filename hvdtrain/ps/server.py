"""One bucket of the weights on its server. It knows nothing of processes or networks: drive it with plain calls."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hvdtrain.errors import Failure
from hvdtrain.optim import restore_state, set_lr, state_of
from hvdtrain.ps.roll import GIVEN_UP


@dataclass(frozen=True)
class Push:
    """A worker's gradient for this bucket.

    Attributes:
        worker, step: who computed it, at which of its steps (from 1). A step is applied once, however often it comes.
        version_read: the version of the weights it was computed from.
        lr: the learning rate of the step.
        gradient: [bucket] float32, the server's to overwrite; None where it overflowed (fp16).
        answer: resolved with an Answer once the worker may go on.
    """

    worker: int
    step: int
    version_read: int
    lr: float
    gradient: torch.Tensor | None
    answer: "Future[Answer]" = field(default_factory=Future)


@dataclass(frozen=True)
class Answer:
    """Fresh weights for a worker.

    Attributes:
        version: how many updates these weights have seen.
        staleness: how many updates the weights saw between this push's version_read and its application.
        weights: [bucket] float32, which nobody changes before this worker pushes again.
    """

    version: int
    staleness: int
    weights: torch.Tensor


@dataclass(frozen=True)
class Applied:
    """One line of the ledger: whose gradient of which step made `version` of a bucket, and from which it came."""

    worker: int
    step: int
    version_read: int
    version: int


def nobody(applied: Applied) -> None:
    """The ledger of a run that is not recorded."""


class Policy(Protocol):
    """When pushes are applied and workers go on: the difference between the parameter-server modes."""

    def begin(self, step: int) -> None:
        """Every worker has taken this step, of a snapshot, and none has pushed here yet."""

    def accept(self, bucket: "Bucket", push: Push) -> None:
        """Take a push of a step not seen before. Called with the bucket locked; answers whom it lets go on."""

    def rest(self, bucket: "Bucket", worker: int, step: int) -> None:
        """The worker evaluates, or is done, after this step: let nobody wait for it until it pushes again.

        Called as accept is; its push of that step may come later than this, on another thread.
        """

    def gave(self, bucket: "Bucket", worker: int) -> None:
        """The worker is given the weights as they are."""

    def lose(self, bucket: "Bucket", worker: int) -> None:
        """The worker is gone for good: let nobody wait for it ever. Called as accept is.

        Raises:
            Failure: the others cannot go on without it.
        """


class Bucket:
    """A contiguous range of the flat weights with its optimizer's state.

    Args:
        weights: [bucket] float32; kept, not copied.
        make_optimizer: given the one parameter, its optimizer.
        policy: when pushes are applied.
        ledger: told of every push that was applied, in order.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        policy: Policy,
        ledger: Callable[[Applied], None] = nobody,
    ) -> None:
        self.weights = weights
        self.optimizer = make_optimizer([self.weights])
        self.policy = policy
        self.ledger = ledger
        self.version = 0
        self._last: dict[int, int] = {}  # worker -> the step of its last push
        self._open: dict[int, Future[Answer]] = {}  # worker -> the answer that it waits for
        self._lent: set[int] = set()  # workers whose answer is this memory, and may be on its way still
        self._gone: set[int] = set()  # workers that were lost
        self._lock = threading.Lock()

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        """Go on as after this step of every worker, with the state of the optimizer, as optim.state_of gives it."""
        with self._lock:
            restore_state(self.optimizer, [self.weights], state)
            self.policy.begin(step)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """What the optimizer remembers of this bucket: as restore takes it."""
        with self._lock:
            return state_of(self.optimizer, [self.weights])

    def push(self, push: Push) -> "Future[Answer]":
        """Hand in a gradient; the future holds fresh weights once the policy lets the worker go on.

        A push that comes again is not applied again; it is answered as the first is, or was.

        Raises:
            Failure: the worker had been given up.
        """
        with self._lock:
            self._refuse_the_gone(push.worker)
            if push.step > self._last.get(push.worker, 0):
                self._last[push.worker] = push.step
                self._lent.discard(push.worker)  # it has its answer, or it could not have gone on
                self._open[push.worker] = push.answer
                self.policy.accept(self, push)
            return self._answer(push.worker)

    def answer(self, worker: int) -> "Future[Answer]":
        """The answer to the worker's last push."""
        with self._lock:
            return self._answer(worker)

    def _answer(self, worker: int) -> "Future[Answer]":
        answer = self._open.get(worker)
        if answer is None:  # it was given, and not kept: what has come since is welcome too
            answer = Future()
            answer.set_result(self._lend(worker, staleness=0))
        elif answer.done():
            del self._open[worker]
        return answer

    def _lend(self, worker: int, staleness: int) -> Answer:
        self._lent.add(worker)
        self.policy.gave(self, worker)
        return Answer(self.version, staleness, self.weights.detach())

    def rest(self, worker: int, step: int) -> None:
        """The worker pushes nothing for now, after this step."""
        with self._lock:
            self._refuse_the_gone(worker)
            self.policy.rest(self, worker, step)

    def lose(self, worker: int) -> None:
        """The worker is gone for good. Failure where the others cannot go on without it."""
        with self._lock:
            self._gone.add(worker)
            self._lent.discard(worker)
            self._open.pop(worker, None)
            self.policy.lose(self, worker)

    def read(self, worker: int) -> Answer:
        """The weights as they are, for a worker that pushes nothing before it has them."""
        with self._lock:
            self._refuse_the_gone(worker)
            return self._lend(worker, staleness=0)

    def _refuse_the_gone(self, worker: int) -> None:
        if worker in self._gone:
            raise Failure(GIVEN_UP)

    # For policies, which hold the lock.

    def apply(self, gradient: torch.Tensor | None, lr: float, *made_of: Push) -> None:
        """One optimizer step with a gradient that was made of these pushes; none where one of them overflowed."""
        if gradient is None:
            return
        if self._lent:  # leave them what they are reading
            self.weights.data = self.weights.clone()
            self._lent = set()
        set_lr(self.optimizer, lr)
        self.weights.grad = gradient
        self.optimizer.step()
        self.weights.grad = None
        self.version += 1
        for push in made_of:
            self.ledger(Applied(push.worker, push.step, push.version_read, self.version))

    def reply(self, push: Push, staleness: int) -> None:
        """Let the worker go on with the weights as they are."""
        push.answer.set_result(self._lend(push.worker, staleness))
