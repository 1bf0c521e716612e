"""What a ring offers so that it can lose workers and take in new ones."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.base.errors import Failure
from hvdtrain.base.system.connections import OwnConnections
from hvdtrain.job.coordination.synchroniser import Synchroniser, ring_traffic

Together = Callable[[Callable[[], Any]], Any]  # see Membership.together


class StateLost(Failure):
    """Some of the job's state was on lost workers alone: no ring of the others can go on."""


class RestartableRing(ABC):
    """A plain ring that can be ended, and started again among other workers.

    It does what it is told, and knows nothing of who is lost or joins: see Membership. The methods
    are called by the main thread, in the order `end`, `offer`, `start`, `settle`; only `abandon` is
    called by any thread, at any time.

    Args:
        inner: the plain synchroniser, whose gradients the ring averages.
        connections: takes note of the ring's connections.

    Attributes:
        workers: how many workers are in the ring.
        each_has_all: whether each worker has all of the optimizer's state.
    """

    workers = 1
    each_has_all = True

    def __init__(self, inner: Synchroniser, connections: OwnConnections) -> None:
        self.inner = inner
        self.connections = connections

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Prepares the model, whose weights are the same on all workers.

        Returns:
            The module to call forward on.
        """

    def end(self) -> None:  # noqa: B027
        """Blocks until nothing of an abandoned ring runs on this worker any more.

        The others wait meanwhile: no ring starts before all have ended theirs.
        """

    @abstractmethod
    def offer(self) -> Any:
        """Returns what this worker tells the others before a ring starts, of plain types."""

    @abstractmethod
    def start(self, workers: Sequence[int], place: int, offers: Mapping[int, Any]) -> None:
        """Starts a ring. Blocks until its other workers have called this too.

        Args:
            workers: the numbers of the ring's workers, in the order of the ring.
            place: this worker's place in the ring, from 0.
            offers: each worker's offer, by its number.

        Raises:
            StateLost: no ring can go on.
            Exception: the ring did not start here.
        """

    def settle(self) -> None:  # noqa: B027
        """Goes on in the ring that was started: it has started on all workers."""

    @abstractmethod
    def abandon(self) -> None:
        """Has whatever waits for the ring end soon, with a failure."""

    @abstractmethod
    def wait(self) -> str:
        """Blocks, after backward, until this worker has all averages. No weight changes yet.

        Returns:
            Why this worker lacks averages; empty where it has all.

        Raises:
            Failure: something is wrong with the model, not with the ring.
        """

    def apply(self) -> None:  # noqa: B027
        """Takes the step, which all workers take, where `inner.update` does not."""

    @abstractmethod
    def take_payload(self) -> int:
        """Returns the bytes handed over to be averaged since the last call.

        They are counted as they are sent, also in a step that came to nothing.
        """

    def take_sent(self) -> int:
        """Returns the bytes that this worker has sent since the last call."""
        sent, _ = ring_traffic(self.workers, self.take_payload())
        return sent

    def take_in(self) -> None:  # noqa: B027
        """Makes all workers alike after one has joined between two rounds."""

    def optimizer_parts(self, together: Together) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yields the optimizer's state: see Synchroniser.optimizer_parts.

        Args:
            together: calls a function that needs the ring: see Membership.together.
        """
        return self.inner.optimizer_parts()
