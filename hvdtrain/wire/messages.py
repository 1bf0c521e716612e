"""What workers and servers tell each other, and what each of them remembers of it."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hvdtrain.errors import Failure
from hvdtrain.numerics.split import step_of_share

INLINE_BYTES = 16 * 2**10  # up to so many, a tensor travels in its message: beside it, it costs messages of its own
CONNECTION_ENDED = "its connection ended"  # why a peer is lost
GIVEN_UP = "this worker was silent for so long that the others went on without it (see --timeout)"


def refuse_if(is_lost: bool) -> None:
    """Failure for a worker that the others went on without."""
    if is_lost:
        raise Failure(GIVEN_UP)


class Push(NamedTuple):
    """A worker's gradient for one bucket.

    Attributes:
        worker, step: who computed it, at which of its steps (from 1). A step is applied at most once.
        version_read: the version of the weights it was computed from.
        lr: the learning rate of the step.
        gradient: on the wire, the tensors that the codec made of it, or where they lie (see shared.Parcel); on the
            server beside the push, decoded.
        share: the number of the leased share that it is the gradient of, if it is of one.
    """

    worker: int
    step: int
    version_read: int
    lr: float
    gradient: Any
    share: int | None = None

    def step_of_job(self, workers: int) -> int:
        """The job's step that it belongs to: where shares are leased, the worker's own has another number."""
        return self.step if self.share is None else step_of_share(self.share, workers)


class Answer(NamedTuple):
    """Fresh weights for a worker.

    Attributes:
        version: how many updates these weights have seen.
        staleness: how many updates the weights saw between the push's version_read and its application.
        weights: [bucket] float32, which nobody changes before this worker pushes again; on the wire, perhaps where
            they lie.
        dropped: where the push came too late and was dropped, the last step that is over; else 0.
    """

    version: int
    staleness: int
    weights: torch.Tensor
    dropped: int = 0


class Applied(NamedTuple):
    """One line of the ledger: whose gradient of which step made `version` of a bucket, and from which it came.

    Attributes:
        version: None where the gradient was dropped: it came too late, or another's of the same share was here before.
    """

    worker: int
    step: int
    version_read: int
    version: int | None


class Outcome(NamedTuple):
    """What came of a message to a part of a server.

    Attributes:
        replies: what is answered, by who or what waits for it; an exception is raised there.
        lines: what the ledger gets.
        asked: who waits for the answer to this message, now or later; None: nobody.
    """

    replies: Mapping[Any, Any] = {}
    lines: Sequence[tuple[Any, ...]] = ()
    asked: Any = None


def at_once(value: Any) -> Outcome:
    """This answers the message."""
    return Outcome({"who asks": value}, asked="who asks")


class Part(Protocol):
    """A part of what a server knows, as plain state: without locks, futures, clocks and files. Its methods take a
    message and return an Outcome; one that is refused raises Failure, and has changed nothing.
    """

    def state(self) -> tuple[Any, Mapping[str, tuple[torch.Tensor | None, Hashable]]]:
        """What survives a kill: what pickle takes, and tensors by name: see ps.crash_memory.SavedState.save."""

    def restore(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Know this, of which the tensors are its own from now on."""


class PushStatus:
    """What a worker knows of its push of one step: complete when every bucket has been answered.

    Attributes:
        read: the versions of the weights that were pushed from, of each bucket that is under way or answered.
        closed: of each bucket that is answered, the last step that was over where it came too late, or 0.
        seen: how many updates the weights saw in between, of each bucket that is answered: noted last, since another
            thread may look.
    """

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.read: list[int] = []
        self.closed: list[int] = []
        self.seen: list[int] = []

    @property
    def pending(self) -> int:
        """Buckets still to be answered."""
        return self.buckets - len(self.seen)

    @property
    def version_read(self) -> int | None:
        """The oldest version that the gradients were computed from."""
        return min(self.read, default=None)

    @property
    def staleness(self) -> int:
        """The largest of what is in `seen`."""
        return max(self.seen, default=0)

    @property
    def dropped(self) -> int:
        """Buckets for which it came too late."""
        return sum(map(bool, self.closed))
