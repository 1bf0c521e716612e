"""The workers as a server knows them: who is still there, and the sums over those. It knows nothing of networks."""

import threading
import time
from collections.abc import Sequence

import torch
from torch.futures import Future

from hvdtrain.errors import Failure

GIVEN_UP = "this worker was silent for so long that the others went on without it (see --timeout)"


class Membership:
    """Which of the workers are still there, and what they add up together.

    A sum is over the workers that are there: it is done when each of them has given its summand, and whoever is lost
    later stays in the sums that it was in.
    """

    def __init__(self, workers: int) -> None:
        self.workers, self.present = workers, set(range(workers))
        self._summands: dict[int, dict[int, torch.Tensor]] = {}  # number of the sum -> worker -> its summand
        self._sums: dict[int, Future[torch.Tensor]] = {}
        self._heard = dict.fromkeys(self.present, time.monotonic())  # when a worker was last heard
        self._lock = threading.Lock()

    def add(self, worker: int, number: int, values: torch.Tensor) -> "Future[torch.Tensor]":
        """A worker's summand of its sum of that number, from 1; the future holds the sum, of the same shape and dtype.

        Summands are added in the order of the workers, so that the same summands give the same bits. One that comes
        again, since the worker has waited for long, counts once.

        Raises:
            Failure: the worker had been given up.
        """
        with self._lock:
            self._refuse_lost(worker)
            self.heard(worker)
            future = self._sums.setdefault(number, Future())
            self._sums.pop(number - 2, None)  # all have it, or they could not have come to the next one
            if not future.done():
                self._summands.setdefault(number, {})[worker] = values
                self._finish(number)
            return future

    def lose(self, worker: int) -> None:
        """The worker is gone for good."""
        with self._lock:
            self.present.discard(worker)
            for number in list(self._summands):
                self._finish(number)

    def heard(self, worker: int) -> None:
        """The worker sent something."""
        self._heard[worker] = time.monotonic()

    def silent(self, workers: Sequence[int], seconds: float) -> list[int]:
        """Those of the workers that were not heard for so long."""
        return [worker for worker in workers if time.monotonic() - self._heard[worker] > seconds]

    def missing(self, worker: int, number: int) -> list[int]:
        """The workers that a sum still waits for, as this worker asks.

        Raises:
            Failure: the worker had been given up: it would wait for others without end.
        """
        with self._lock:
            self._refuse_lost(worker)
            return sorted(self.present - set(self._summands[number])) if number in self._summands else []

    def _refuse_lost(self, worker: int) -> None:
        if worker not in self.present:
            raise Failure(GIVEN_UP)

    def _finish(self, number: int) -> None:
        """Do the sum, if it waits for nobody any more."""
        own = self._summands[number]
        if self.present <= own.keys():
            del self._summands[number]
            self._sums[number].set_result(torch.stack([own[worker] for worker in sorted(own)]).sum(0))
