"""What workers and servers tell each other, and what each of them remembers of it."""

from typing import Any, NamedTuple

import torch

from hvdtrain.numerics.split import step_of_share

NO_SHARE = -1
INLINE_BYTES = 16 * 2**10  # up to so many, a tensor travels in its message: beside it, it costs messages of its own
CONNECTION_ENDED = "its connection ended"  # why a peer is lost


class Push(NamedTuple):
    """A worker's gradient for one bucket.

    Attributes:
        worker, step: who computed it, at which of its steps (from 1). A step is applied at most once.
        version_read: the version of the weights it was computed from.
        lr: the learning rate of the step.
        gradient: on the wire, the tensors that the codec made of it, or where they lie (see shared.Parcel); on the
            server [bucket] float32, its own to overwrite until the push is answered. None where another's of the same
            share was here before.
        share: the number of the leased share that it is the gradient of, or NO_SHARE.
    """

    worker: int
    step: int
    version_read: int
    lr: float
    gradient: Any
    share: int = NO_SHARE

    def step_of_job(self, workers: int) -> int:
        """The job's step that it belongs to: where shares are leased, the worker's own has another number."""
        return self.step if self.share == NO_SHARE else step_of_share(self.share, workers)

    def with_gradient(self, gradient: Any) -> "Push":
        """This push with another gradient, or none: _replace takes five times as long."""
        return Push(self.worker, self.step, self.version_read, self.lr, gradient, self.share)


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
