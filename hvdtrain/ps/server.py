"""One server's shard of the weights. It knows nothing of processes or networks: drive it with plain calls."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hvdtrain.optim import set_lr


@dataclass(frozen=True)
class Push:
    """A worker's gradient for this shard.

    Attributes:
        worker, step: who computed it, at which of its steps (from 1). A step is applied once, however often it comes.
        version_read: the version of the weights it was computed from.
        lr: the learning rate of the step.
        gradient: [shard] float32.
        answer: resolved with an Answer once the worker may go on.
    """

    worker: int
    step: int
    version_read: int
    lr: float
    gradient: torch.Tensor
    answer: "Future[Answer]" = field(default_factory=Future)


@dataclass(frozen=True)
class Answer:
    """Fresh weights for a worker.

    Attributes:
        version: how many updates these weights have seen.
        staleness: how many updates the weights saw between this push's version_read and its application.
        weights: [shard] float32, a snapshot that no later update changes.
    """

    version: int
    staleness: int
    weights: torch.Tensor


class Policy(Protocol):
    """When a push is applied: the difference between the parameter-server modes."""

    def accept(self, shard: "Shard", push: Push) -> None:
        """Take a push of a step not seen before. Called with the shard locked; resolves answers when it may."""

    def join(self, push: Push) -> bool:
        """Whether a push of a step already seen waits with it for the same answer."""


class Shard:
    """A contiguous range of the flat weights with its optimizer's state.

    Args:
        weights: [shard] float32; kept, not copied.
        make_optimizer: given the one parameter, its optimizer.
        policy: when pushes are applied.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        policy: Policy,
    ) -> None:
        self.weights = weights
        self.optimizer = make_optimizer([self.weights])
        self.policy = policy
        self.version = 0
        self._seen: dict[int, int] = {}  # worker -> its last step
        self._snapshot: Answer | None = None
        self._lock = threading.Lock()

    def push(self, push: Push) -> "Future[Answer]":
        """Hand in a gradient; the future holds fresh weights once the policy lets the worker go on."""
        with self._lock:
            if push.step > self._seen.get(push.worker, 0):
                self._seen[push.worker] = push.step
                self.policy.accept(self, push)
            elif not self.policy.join(push):
                push.answer.set_result(self.snapshot(staleness=0))
        return push.answer

    def pull(self) -> Answer:
        """The weights as they are."""
        with self._lock:
            return self.snapshot(staleness=0)

    def apply(self, gradient: torch.Tensor, lr: float) -> None:
        """One optimizer step. For policies, which hold the lock."""
        set_lr(self.optimizer, lr)
        self.weights.grad = gradient
        self.optimizer.step()
        self.weights.grad = None
        self.version += 1
        self._snapshot = None

    def snapshot(self, staleness: int) -> Answer:
        """An answer with the current weights; workers that read the same version share one copy."""
        if self._snapshot is None:
            self._snapshot = Answer(self.version, 0, self.weights.clone())
        return Answer(self.version, staleness, self._snapshot.weights)
