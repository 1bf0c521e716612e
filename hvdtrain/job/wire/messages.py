"""The messages between workers and servers, and a worker's record of its pushes.

This module is imported without torch, so that a simulation can push.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.split import step_of_share

if TYPE_CHECKING:
    import torch

# Larger tensors travel beside their message, which costs messages of their own.
INLINE_BYTES = 16 * 2**10
CONNECTION_ENDED = "its connection ended"  # why a peer is lost
NO_ANSWER = "no answer within"  # how the reason begins where a call took too long
UNLIKE = (
    "the workers came together with values of different shapes: all call the same functions of the "
    "job in the same order"
)
GIVEN_UP = "this worker was silent for so long that the others went on without it (see --timeout)"


def no_answer(seconds: float) -> str:
    return f"{NO_ANSWER} {seconds:g} s (see --timeout)"


def refuse_if(is_lost: bool) -> None:
    """Raises Failure for a worker that the others went on without."""
    if is_lost:
        raise Failure(GIVEN_UP)


class Push(NamedTuple):
    """A worker's gradient for one bucket.

    Attributes:
        worker: the number of the worker that computed the gradient.
        step: the worker's step, from 1. A server applies a worker's step at most once.
        version_read: the version of the weights that the gradient was computed from.
        lr: the learning rate of the step.
        gradient: on the wire, the codec's tensors, or where they lie (see shared.Parcel). On the
            server None: the decoded gradient is passed beside the push.
        share: the number of the leased share that was trained on; None where shares are not leased.
        settings: what else the optimizer's step is taken with: see numerics.optimizers.Settings.
    """

    worker: int
    step: int
    version_read: int
    lr: float
    gradient: Any
    share: int | None = None
    settings: Mapping[str, Any] = {}

    def without_tensors(self) -> Push:
        """Returns the push as a server keeps it."""
        return self._replace(gradient=None)

    def step_of_job(self, workers: int) -> int:
        """Returns the job's step. Where shares are leased, the worker counts its steps apart."""
        return self.step if self.share is None else step_of_share(self.share, workers)


class FreshWeights(NamedTuple):
    """A server's answer to a push or pull of one bucket.

    Attributes:
        version: how many updates the weights have seen.
        staleness: how many updates the weights saw between the push's version_read and its
            application.
        weights: [bucket] float32. Nobody changes this memory while the worker may read it. On the
            wire, this may be where the tensor lies (see shared.Parcel).
        dropped: the last step that is over, where the push came too late and was dropped; else 0.
    """

    version: int
    staleness: int
    weights: torch.Tensor
    dropped: int = 0


class LedgerLine(NamedTuple):
    """One line of a server's ledger: what became of a push of one bucket.

    Attributes:
        worker, step, version_read: see Push.
        version: the version of the weights that the push made. None where the push was dropped: it
            came too late, or another worker's push of the same share counts.
    """

    worker: int
    step: int
    version_read: int
    version: int | None


class Part(Protocol):
    """A part of a server's state, without locks, futures, clocks and files.

    A method takes a message and returns the answers to send, by who waits for each. A message that
    is refused raises Failure, and has changed nothing.
    """

    def take_lines(self) -> Sequence[tuple[Any, ...]]:
        """Returns the ledger lines of what was done since the last call."""

    def state(self) -> tuple[Any, Mapping[str, tuple[torch.Tensor | None, Hashable]]]:
        """Returns what survives a kill.

        Returns:
            An object for pickle, and tensors by name: see ps.crash_memory.SavedState.save.
        """

    def restore(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes over a state that was saved. The tensors belong to this part from now on."""


class PushStatus:
    """A worker's push of one step. It is complete when every bucket has been answered.

    Attributes:
        buckets: how many buckets the step pushes.
        read: the versions of the weights that were pushed from, of each bucket that was sent.
        closed: of each bucket that was answered, the last step that was over where the push came
            too late, or 0.
        seen: the staleness of each bucket that was answered. Appended last, since another thread
            may look.
    """

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.read: list[int] = []
        self.closed: list[int] = []
        self.seen: list[int] = []

    @property
    def pending(self) -> int:
        """The number of buckets that are not answered yet."""
        return self.buckets - len(self.seen)

    @property
    def version_read(self) -> int | None:
        """The oldest version that the gradients were computed from."""
        return min(self.read, default=None)

    @property
    def staleness(self) -> int:
        """The largest staleness of the buckets that were answered."""
        return max(self.seen, default=0)

    @property
    def dropped(self) -> int:
        """The number of buckets whose push came too late."""
        return sum(map(bool, self.closed))
