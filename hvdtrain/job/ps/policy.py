"""A parameter-server mode's policy: when pushes are applied, and when workers go on.

This module is imported without torch, so that modes can be listed without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from hvdtrain.job.wire.messages import Push


class Update(NamedTuple):
    """One step of a bucket's optimizer.

    Attributes:
        gradient: [bucket] float32.
        lr: the learning rate.
        pushes: the pushes that the gradient was made of.
        look_ahead: until the next update, workers are sent the weights as so many more updates
            like this one would make them.
    """

    gradient: torch.Tensor
    lr: float
    pushes: Sequence[Push]
    look_ahead: float = 0.0


class Release(NamedTuple):
    """A worker that may go on, with fresh weights.

    Attributes:
        worker: the worker's number.
        staleness, dropped: see FreshWeights.
    """

    worker: int
    staleness: int
    dropped: int = 0


class PolicyDecision(NamedTuple):
    """A policy's decision about a message.

    Attributes:
        updates: what the optimizer applies, in this order.
        released: the workers that are answered after the updates.
        dropped: pushes that are left out.
    """

    updates: Sequence[Update] = ()
    released: Sequence[Release] = ()
    dropped: Sequence[Push] = ()


class Policy:
    """Decides when a bucket's pushes are applied and when workers go on.

    Parameter-server modes differ in their policies alone.

    Attributes:
        compensation: the strength of delay compensation: see BucketWeights.compensate.
        sum: [bucket] float32, the sum of gradients that no update was made of yet.
    """

    compensation = 0.0
    sum: torch.Tensor | None = None

    def begin(self, step: int) -> None:
        """Goes on after this step of a snapshot, which every worker has taken."""

    def accept(self, push: Push, gradient: torch.Tensor | None, version: int) -> PolicyDecision:
        """Takes a push of a step that was not pushed before.

        Args:
            push: the push, without its tensors.
            gradient: [bucket] float32, which the policy may overwrite until the push is answered.
                None where another worker's push of the same share counts. `hvdtrain plan`, which
                simulates servers by their policies, hands in one without elements: see
                planning.policies.
            version: the weights' version.
        """
        raise NotImplementedError

    def flush(self) -> PolicyDecision:
        """Makes an update of the pushes that wait for others, if there are any."""
        return PolicyDecision()

    def idle(self, worker: int, step: int, at_barrier: bool) -> PolicyDecision:
        """Takes note that a worker pushes nothing for now: it evaluates, or is done.

        No other worker waits for it until it pushes again or, where it is at a barrier, until all
        workers are there. The worker's push of this step may still come, on another thread.

        Args:
            worker: the worker's number.
            step: the last step that the worker has pushed.
            at_barrier: whether the worker waits at a barrier.
        """
        return PolicyDecision()

    def join(self, worker: int, step: int) -> None:
        """Counts a new worker in, as if it had pushed this step.

        Raises:
            Failure: the mode has as many workers as it began with.
        """

    def lose(self, worker: int) -> PolicyDecision:
        """Goes on without a worker, for which nobody waits any more.

        Raises:
            Failure: the mode needs all of its workers.
        """
        return PolicyDecision()

    def waits(self, worker: int) -> bool:
        """Returns whether a push of this worker is held, to be answered later."""
        return False
