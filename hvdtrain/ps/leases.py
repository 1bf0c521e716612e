"""Shares of an epoch, handed to workers as they are ready: a fast worker does more of them.

It knows nothing of networks. Shares are numbered over the whole job: see data.sampling.BatchSampler.share.
"""

import heapq
import threading
from collections.abc import Callable

from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.ps.crash_memory import SavedState
from hvdtrain.ps.membership import GIVEN_UP

NONE_NOW = -1  # in place of a share's number
_SAVED = ("lines", "begin", "end", "next", "_returned", "samples", "_lost", "_open")


class Leases:
    """Which worker has which share. Only the first server has any to lease.

    Shares are leased in rounds: from one number to another, an epoch as a rule, each share once. A lease is finished
    when its worker knows that every server has taken its gradient; that of a worker that is lost before goes to
    another. What a bucket has of it already counts there: see bucket.Bucket.lose.

    Attributes:
        samples_of: how many samples a share has, once that is known.
        samples: by worker, of the leases that it has finished.

    Args:
        ledger: called with worker, its step, and the share of every lease.
        saved: has all of this as of the last answer, for whoever comes back in place of a server that was killed.
    """

    def __init__(
        self,
        ledger: Callable[[int, int, int], None] = lambda worker, step, share: None,
        saved: SavedState | None = None,
    ) -> None:
        self.ledger, self._saved, self.lines = ledger, saved, 0
        self.begin, self.end, self.next = -1, 0, 0
        self._returned: list[int] = []  # a heap of shares whose workers were lost
        self.samples_of: Callable[[int], int] = lambda share: 0
        self.samples: dict[int, int] = {}
        self._lost: set[int] = set()  # workers
        self._open: dict[int, tuple[int, int]] = {}  # share -> the worker that has it, and at which of its steps
        self._waiting: list[tuple[int, int, Future[tuple[int, int]]]] = []  # worker, its step, what it waits for
        self._lock = threading.Lock()
        if saved and saved.plain is not None:
            for name, value in saved.plain.items():
                setattr(self, name, value)

    @property
    def lost(self) -> frozenset[int]:
        """Workers whose leases went to others."""
        return frozenset(self._lost)

    def lease(self, worker: int, step: int, begin: int, end: int) -> int:
        """The share that the worker takes at this step of its own, or NONE_NOW. Asked again, it gets that again.

        Args:
            begin, end: the round's shares, the last one excluded; a new `begin` begins a new round.

        Raises:
            Failure: the worker had been given up.
        """
        with self._lock:
            self._refuse_lost(worker)
            if begin != self.begin:
                self.begin, self.end, self.next = begin, end, begin
            share = self._give(worker, step)
            self._save()
            return share

    def wait(self, worker: int, step: int) -> "Future[tuple[int, int]]":
        """For a worker that got none: a share that another lost, or NONE_NOW when all are finished; and the number of
        the first share that was not leased.

        Raises:
            Failure: the worker had been given up.
        """
        with self._lock:
            self._refuse_lost(worker)
            self._waiting = [waiting for waiting in self._waiting if waiting[0] != worker]
            future: Future[tuple[int, int]] = Future()
            self._waiting.append((worker, step, future))
            self._serve_waiting()
            return future

    def pause(self, workers: int) -> None:
        """End the round early: after the shares, as many as workers, of the global batch that has been begun."""
        with self._lock:
            whole = -(-self.next // workers) * workers
            self.end = min(self.end, max(whole, self.begin + workers))
            self._save()

    def finished(self, worker: int, step: int) -> None:
        """The worker has been answered all pushes of this step of its own, and of those before."""
        with self._lock:
            if worker in self._lost:  # and others have these shares
                return
            done = [share for share, (holder, its) in self._open.items() if holder == worker and its <= step]
            for share in done:
                del self._open[share]
                self.samples[worker] = self.samples.get(worker, 0) + self.samples_of(share)
            self._serve_waiting()

    def lose(self, worker: int) -> None:
        """The worker is gone for good: others take the shares that it had."""
        with self._lock:
            self._lost.add(worker)
            for share in [share for share, (holder, _) in self._open.items() if holder == worker]:
                del self._open[share]
                heapq.heappush(self._returned, share)
            self._waiting = [waiting for waiting in self._waiting if waiting[0] != worker]
            self._serve_waiting()

    def _refuse_lost(self, worker: int) -> None:
        if worker in self._lost:
            raise Failure(GIVEN_UP)

    def _give(self, worker: int, step: int) -> int:
        if given := [share for share, lease in self._open.items() if lease == (worker, step)]:
            return given[0]
        if self._returned:
            share = heapq.heappop(self._returned)
        elif self.next < self.end:
            share, self.next = self.next, self.next + 1
        else:
            return NONE_NOW
        self._open[share] = worker, step
        self.lines += 1
        self.ledger(worker, step, share)
        return share

    def _serve_waiting(self) -> None:
        """Save what has changed, and answer who waits for that."""
        served = []
        while self._waiting and self._has_answer(*self._waiting[0][:2]):
            worker, step, future = self._waiting.pop(0)
            served.append((future, (self._give(worker, step), self.next)))
        self._save()
        for future, answer in served:
            future.set_result(answer)

    def _has_answer(self, worker: int, step: int) -> bool:
        return bool(self._returned) or self.next < self.end or not self._open or (worker, step) in self._open.values()

    def _save(self) -> None:
        if self._saved:
            self._saved.save({name: getattr(self, name) for name in _SAVED}, {})
