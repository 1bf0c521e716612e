"""The workers as a server knows them: who is there, who joins, and the sums over those. It knows nothing of networks.

Each life of a worker has a number of its own, never given twice: those that are there at the start have 0 … N - 1, and
who joins later, in place of a lost one or beside the others, the next. So what comes late of a former life is nobody's.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.ps.crash_memory import SavedState

GIVEN_UP = "this worker was silent for so long that the others went on without it (see --timeout)"
_SAVED = ("workers", "present", "_next", "_summands", "_apart", "_join_point", "_is_open")


class JoinPoint(NamedTuple):
    """What somebody who joins has to know to be where the others are, from one sum until the next.

    Attributes:
        sums: how many there were before.
        began: time.monotonic().
        state: what the workers have come to, of plain types and tensors.
    """

    sums: int
    began: float
    state: Any


class Membership:
    """Which of the workers are still there, and what they add up together.

    A sum is over the workers that are there: it is done when each of them has given its summand, and whoever is lost
    later stays in the sums that it was in.

    Attributes:
        workers: how many there were at the start.
        present: those that are there.

    Args:
        saved: has all of this as of the last answer, for whoever comes back in place of a server that was killed.
    """

    def __init__(self, workers: int, saved: SavedState | None = None) -> None:
        self.workers, self.present = workers, set(range(workers))
        self._next = workers  # the number of whoever joins next
        self._summands: dict[int, dict[int, torch.Tensor]] = {}  # number of the sum -> worker -> its summand
        self._sums: dict[int, Future[torch.Tensor]] = {}
        self._apart: set[int] = set()  # sums whose summands are not added up
        self._heard = dict.fromkeys(self.present, time.monotonic())  # when a worker was last heard
        self._join_point: JoinPoint | None = None
        self._is_open = False  # whether the round's sum is still to be done
        self._joining: list[Future[Any]] = []  # of a number, and a JoinPoint
        self._due: list[tuple[Future[torch.Tensor], torch.Tensor]] = []  # sums that are done, and not yet answered
        self._lock = threading.Lock()
        self._saved = saved
        if saved and saved.plain is not None:
            self._restore(saved.plain)

    def add(self, worker: int, number: int, values: torch.Tensor, as_rows: bool = False) -> "Future[torch.Tensor]":
        """A worker's summand of its sum of that number, from 1; the future holds the sum, of the same shape and dtype.

        Summands are added in the order of the workers, so that the same summands give the same bits. One that comes
        again, since the worker has waited for long, counts once.

        Args:
            as_rows: do not add them up: the future holds them as rows, in that order.

        Raises:
            Failure: the worker had been given up.
        """
        with self._lock:
            self._refuse_lost(worker)
            self.heard(worker)
            future = self._sums.setdefault(number, Future())
            self._sums.pop(number - 2, None)  # all have it, or they could not have come to the next one
            if not future.done():
                if as_rows:
                    self._apart.add(number)
                self._summands.setdefault(number, {})[worker] = values
                self._finish(number)
            self._save()
            return future

    def open_for_joining(self, sums: int, state: Any) -> None:
        """The workers have been through so many sums, and train until the next: whoever joins before that is done is
        with them.
        """
        with self._lock:
            if (done := self._sums.get(sums + 1)) and done.done():
                return
            self._join_point, self._is_open = JoinPoint(sums, time.monotonic(), state), True
            self._save()
        self._admit()

    @property
    def state(self) -> Any:
        """That of the last round, or None."""
        return self._join_point.state if self._join_point else None

    def join(self) -> "Future[tuple[int, JoinPoint]]":
        """Somebody wants to join. The future holds their number and where the others are, in the next round at the
        latest: from then on they are waited for.
        """
        with self._lock:
            future: Future[Any] = Future()
            self._joining.append(future)
        self._admit()
        return future

    def admit(self, worker: int) -> None:
        """A worker is there that another server has let join."""
        with self._lock:
            self.present.add(worker)
            self.heard(worker)
            self._save()

    def close(self, why: str) -> None:
        """Whoever still wants to join is too late."""
        with self._lock:
            for future in self._joining:
                future.set_exception(Failure(why))
            self._joining = []

    def lose(self, worker: int) -> None:
        """The worker is gone for good."""
        with self._lock:
            self.present.discard(worker)
            if not self.present and self._join_point:  # nobody knows what was decided since the last round was opened
                self._summands.clear()
                self._sums.clear()
                self._is_open = True
            for number in list(self._summands):
                self._finish(number)
            self._save()
        self._admit()

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

    def _admit(self) -> None:
        """Answer those who can join, without the lock: what their futures call takes it."""
        admitted = []
        with self._lock:
            while self._is_open and self._join_point and self._joining:
                worker, self._next = self._next, self._next + 1
                self.present.add(worker)
                self.heard(worker)
                admitted.append((self._joining.pop(0), (worker, self._join_point)))
            if admitted:
                self._save()
        for future, place in admitted:
            future.set_result(place)

    def _refuse_lost(self, worker: int) -> None:
        if worker not in self.present:
            raise Failure(GIVEN_UP)

    def _finish(self, number: int) -> None:
        """Do the sum, if it waits for nobody any more."""
        own = self._summands[number]
        if self.present <= own.keys():
            del self._summands[number]
            if self._join_point and number > self._join_point.sums:
                self._is_open = False
            rows = torch.stack([own[worker] for worker in sorted(own)])
            self._due.append((self._sums[number], rows if number in self._apart else rows.sum(0)))
            self._apart.discard(number)

    def _save(self) -> None:
        """Save what has changed, and answer who waits for that."""
        due, self._due = self._due, []
        if self._saved:
            sums = {number: future.value() for number, future in self._sums.items() if future.done()}
            sums |= {number: total for number, future in self._sums.items() for its, total in due if its is future}
            self._saved.save({name: getattr(self, name) for name in _SAVED} | {"sums": sums}, {})
        for future, total in due:
            future.set_result(total)

    def _restore(self, plain: dict[str, Any]) -> None:
        """Know what was saved."""
        sums = plain.pop("sums")
        for name, value in plain.items():
            setattr(self, name, value)
        for number in {*sums, *self._summands}:
            self._sums[number] = Future()
            if number in sums:
                self._sums[number].set_result(sums[number])
        self._heard = dict.fromkeys(self.present, time.monotonic())
