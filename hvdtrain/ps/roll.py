"""The workers as a server knows them: who is still there, and the sums over those. It knows nothing of networks."""

import threading
from concurrent.futures import Future

import torch

from hvdtrain.errors import Failure

GIVEN_UP = "this worker was silent for so long that the others went on without it (see --timeout)"


class Roll:
    """Who of the workers is still there, and what they add up together.

    A sum is over the workers that are there: it is done when each of them has given its part, and whoever is lost
    later stays in the sums that it was in.
    """

    def __init__(self, workers: int) -> None:
        self.present = set(range(workers))
        self._parts: dict[int, dict[int, torch.Tensor]] = {}  # number of the sum -> worker -> its part
        self._totals: dict[int, Future[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def add(self, worker: int, number: int, part: torch.Tensor) -> "Future[torch.Tensor]":
        """A worker's part of its sum of that number, from 1; the future holds the total, of the same shape and dtype.

        The parts are added in the order of the workers, so that the same parts give the same bits.

        Raises:
            Failure: the worker had been given up.
        """
        with self._lock:
            if worker not in self.present:
                raise Failure(GIVEN_UP)
            total = self._totals.setdefault(number, Future())
            self._parts.setdefault(number, {})[worker] = part
            self._finish(number)
            return total

    def lose(self, worker: int) -> None:
        """The worker is gone for good."""
        with self._lock:
            self.present.discard(worker)
            for number in list(self._parts):
                self._finish(number)

    def missing(self, number: int) -> list[int]:
        """The workers that a sum still waits for."""
        with self._lock:
            return sorted(self.present - set(self._parts.get(number, {}))) if number in self._parts else []

    def _finish(self, number: int) -> None:
        parts = self._parts[number]
        if self.present <= set(parts):
            del self._parts[number]
            self._totals.pop(number).set_result(torch.stack([parts[worker] for worker in sorted(parts)]).sum(0))
