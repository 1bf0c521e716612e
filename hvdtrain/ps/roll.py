"""The workers as a server knows them: who is still there, and the sums over those. It knows nothing of networks."""

import threading
import time
from collections.abc import Sequence
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
        self._last = dict.fromkeys(self.present, time.monotonic())  # when a worker was last heard
        self._lock = threading.Lock()

    def add(self, worker: int, number: int, part: torch.Tensor) -> "Future[torch.Tensor]":
        """A worker's part of its sum of that number, from 1; the future holds the total, of the same shape and dtype.

        The parts are added in the order of the workers, so that the same parts give the same bits. A part that comes
        again, since the worker has waited for long, counts once.

        Raises:
            Failure: the worker had been given up.
        """
        with self._lock:
            if worker not in self.present:
                raise Failure(GIVEN_UP)
            self._last[worker] = time.monotonic()
            total = self._totals.setdefault(number, Future())
            self._totals.pop(number - 2, None)  # all have it, or they could not have given parts of the next
            if not total.done():
                self._parts.setdefault(number, {})[worker] = part
                self._finish(number)
            return total

    def lose(self, worker: int) -> None:
        """The worker is gone for good."""
        with self._lock:
            self.present.discard(worker)
            for number in list(self._parts):
                self._finish(number)

    def heard(self, worker: int) -> None:
        """The worker pushed something."""
        self._last[worker] = time.monotonic()

    def silent(self, workers: Sequence[int], seconds: float) -> list[int]:
        """Those of the workers that were not heard for so long."""
        return [worker for worker in workers if time.monotonic() - self._last[worker] > seconds]

    def missing(self, number: int) -> list[int]:
        """The workers that a sum still waits for."""
        with self._lock:
            return sorted(self.present - set(self._parts.get(number, {}))) if number in self._parts else []

    def _finish(self, number: int) -> None:
        parts = self._parts[number]
        if self.present <= set(parts):
            del self._parts[number]
            self._totals[number].set_result(torch.stack([parts[worker] for worker in sorted(parts)]).sum(0))
