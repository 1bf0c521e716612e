"""Shares of an epoch, leased to workers as they are ready: a fast worker trains on more of them.

This is plain state, and knows nothing of networks. Shares are numbered over the whole job: see
data.sampling.BatchSampler.share.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdtrain.base.numerics.split import samples_of_share
from hvdtrain.job.wire.messages import refuse_if


@dataclass(eq=False)
class Leases:
    """Which worker has which share. Only the first server leases shares.

    Shares are leased in rounds, as a rule of an epoch, each share once. A lease is finished when
    its worker knows that every server has taken the share's gradient. Where the worker is lost
    before that, the share goes to another worker. What a bucket has of it already counts there: see
    ps.bucket.Bucket.lose.

    Answers go to workers. A ledger line is a worker, its step, and the share that it leased.

    Attributes:
        workers: how many shares a global batch is cut into.
        fixed: worker i takes share i of every batch, and the shares of workers that are lost.
        begin: the round's first share, which begins a global batch.
        end: the share after the round's last one.
        next: the next share to lease; where shares are fixed, of each worker.
        sizes: the arguments of samples_of_share; empty until they are known.
        samples: how many samples of finished leases each worker has trained on.
        uncounted: workers and their shares that were finished before `sizes` were known.
        lost: the workers whose leases went to others.
        returned: a heap of shares that lost workers had.
        open: of each share that is leased, the worker and the worker's step.
        waiting: the workers that wait for a share, each with its step.
    """

    workers: int
    fixed: bool = False
    begin: int = -1
    end: int = 0
    next: list[int] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    uncounted: list[tuple[int, int]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    returned: list[int] = field(default_factory=list)
    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    _lines: list[tuple[int, int, int]] = field(default_factory=list)

    def lease(self, worker: int, step: int, begin: int, end: int) -> dict[int, Any]:
        """Leases the next share to a worker, which gets the same share when it asks again.

        The worker asks in the backward pass of the step before. All pushes of the last step but
        one were answered by then.

        Args:
            worker: the worker's number.
            step: the worker's step that will train on the share.
            begin: the round's first share. Another number than before begins a new round.
            end: the share after the round's last one.

        Returns:
            The worker's answer is the share, or None where none is left. Answers to workers that
            waited for a share: see await_lease.

        Raises:
            Failure: the worker is lost.
        """
        refuse_if(worker in self.lost)
        answers = self.finished(worker, step - 2)
        if begin != self.begin:
            self.begin = begin
            self.end = end
            self.next = [begin + slot for slot in range(self.workers if self.fixed else 1)]
        answers[worker] = self._give(worker, step)
        return answers

    def await_lease(self, worker: int, step: int) -> dict[int, Any]:
        """Waits for a share that another worker lost; the worker's pushes were all answered.

        Args:
            worker: the worker's number.
            step: the worker's step that will train on the share.

        Returns:
            A worker's answer, now or later, is a share, or None when all shares are finished, and
            the first share that was not leased.

        Raises:
            Failure: the worker is lost.
        """
        refuse_if(worker in self.lost)
        self._stop_waiting(worker)
        self.waiting.append((worker, step))
        return self.finished(worker, step - 1)

    def pause_leases(self) -> None:
        """Ends the round early: after the shares of the global batch that was begun."""
        begun_batches = -(-self.reached // self.workers)
        pause = max(begun_batches * self.workers, self.begin + self.workers)
        self.end = min(self.end, pause)

    def know_sizes(self, sizes: dict[str, Any]) -> None:
        """Takes the arguments of samples_of_share. The first ones hold for the whole job."""
        self.sizes = self.sizes or sizes
        for worker, share in self.uncounted:
            self._count(worker, share)
        self.uncounted = []

    def finished(self, worker: int, step: int) -> dict[int, Any]:
        """Finishes a worker's leases up to this step; all pushes of these steps were answered.

        Returns:
            The answers to workers that waited for a share: see await_lease.
        """
        if worker in self.lost:
            return {}  # other workers have its shares
        finished = [
            share
            for share, (holder, leased_at) in self.open.items()
            if holder == worker and leased_at <= step
        ]
        for share in finished:
            del self.open[share]
            if self.sizes:
                self._count(worker, share)
            else:
                self.uncounted.append((worker, share))
        return self._serve_waiting()

    def lose(self, worker: int) -> dict[int, Any]:
        """Gives a lost worker's shares to others.

        Returns:
            The answers to workers that waited for a share: see await_lease.
        """
        self.lost.add(worker)
        shares = [share for share, (holder, _) in self.open.items() if holder == worker]
        for share in shares:
            del self.open[share]
            heapq.heappush(self.returned, share)
        self._stop_waiting(worker)
        return self._serve_waiting()

    def take_lines(self) -> Sequence[tuple[int, int, int]]:
        """See Part."""
        lines = self._lines
        self._lines = []
        return lines

    def state(self) -> tuple[Any, dict[str, Any]]:
        """See Part."""
        return vars(self), {}

    def restore(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """See Part."""
        vars(self).update(plain)

    @property
    def reached(self) -> int:
        """The share after the last one that was leased."""
        return max(following - len(self.next) + 1 for following in self.next)

    def _count(self, worker: int, share: int) -> None:
        """Adds a finished share's samples to the worker's."""
        trained = samples_of_share(share, workers=self.workers, **self.sizes)
        self.samples[worker] = self.samples.get(worker, 0) + trained

    def _slot(self, worker: int) -> int | None:
        """Returns where in `next` the worker finds a share; None where none is left for it."""
        slots = [worker, *sorted(self.lost)] if self.fixed else [0]
        with_shares = (slot for slot in slots if self.next[slot] < self.end)
        return next(with_shares, None)

    def _give(self, worker: int, step: int) -> int | None:
        """Returns the share for a worker's step; None where none is left."""
        for share, lease in self.open.items():
            if lease == (worker, step):
                return share
        if self.returned:
            share = heapq.heappop(self.returned)
        else:
            slot = self._slot(worker)
            if slot is None:
                return None
            share = self.next[slot]
            self.next[slot] += len(self.next)
        self.open[share] = (worker, step)
        self._lines.append((worker, step, share))
        return share

    def _serve_waiting(self) -> dict[int, Any]:
        """Answers those who wait for a share, in the order of their calls, as far as it goes."""
        answers: dict[int, Any] = {}
        for worker, step in list(self.waiting):
            is_over = not self.open and min(self.next) >= self.end
            is_held = (worker, step) in self.open.values()
            if self.returned or is_held or is_over or self._slot(worker) is not None:
                self.waiting.remove((worker, step))
                share = self._give(worker, step)
                answers[worker] = (share, self.reached)
        return answers

    def _stop_waiting(self, worker: int) -> None:
        self.waiting = [waiting for waiting in self.waiting if waiting[0] != worker]
