"""Shares of an epoch, handed to workers as they are ready: a fast worker does more of them.

It is plain state, and knows nothing of networks. Shares are numbered over the whole job: see
data.sampling.BatchSampler.share.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdtrain.numerics.split import samples_of_share
from hvdtrain.wire.messages import Outcome, refuse_if


@dataclass(eq=False)
class Leases:
    """Which worker has which share. Only the first server has any to lease.

    Shares are leased in rounds: from one number to another, an epoch as a rule, each share once. A lease is finished
    when its worker knows that every server has taken its gradient; that of a worker that is lost before goes to
    another. What a bucket has of it already counts there: see bucket.Bucket.lose.

    Replies go to workers; lines are worker, its step, and the share of every lease.
    """

    workers: int  # how many shares a global batch is cut into
    fixed: bool = False  # each worker has the share of its number of every batch, and those of workers that are lost
    begin: int = -1  # the round's first share, of a new batch
    end: int = 0  # the one after its last
    next: list[int] = field(default_factory=list)  # the share to lease next: where they are fixed, of each worker
    sizes: tuple[int, int] | None = None  # of the data set and the global batch, once that is known
    samples: dict[int, int] = field(default_factory=dict)  # by worker, of the leases that it has finished
    lost: set[int] = field(default_factory=set)  # workers whose leases went to others
    returned: list[int] = field(default_factory=list)  # a heap of the shares that they had
    # Share -> the worker that has it, and at which of its steps.
    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)  # a worker, and its step

    def lease(self, worker: int, step: int, begin: int, end: int) -> Outcome:
        """The share that the worker takes at this step of its own, or None. Asked again, it gets that again. It asks
        amid the backward pass of the step before, in whose forward every answer to the step before that was there.

        Args:
            begin, end: the round's shares, the last one excluded; a new `begin` begins a new round.

        Raises:
            Failure: the worker had been given up.
        """
        refuse_if(worker in self.lost)
        replies, lines, _ = self.finished(worker, step - 2)
        if begin != self.begin:
            self.begin, self.end = begin, end
            self.next = [begin + slot for slot in range(self.workers if self.fixed else 1)]
        lines = list(lines)
        return Outcome({**replies, worker: self._give(worker, step, lines)}, lines, worker)

    def await_lease(self, worker: int, step: int) -> Outcome:
        """For a worker that got none, and has every answer: a share that another lost, or None when all are finished;
        and the number of the first share that was not leased.

        Raises:
            Failure: the worker had been given up.
        """
        refuse_if(worker in self.lost)
        self.waiting = [*(waiting for waiting in self.waiting if waiting[0] != worker), (worker, step)]
        return self.finished(worker, step - 1)._replace(asked=worker)

    def pause_leases(self) -> Outcome:
        """End the round early: after the shares of the global batch that has been begun."""
        whole = -(-self.reached // self.workers) * self.workers
        self.end = min(self.end, max(whole, self.begin + self.workers))
        return Outcome()

    def know_sizes(self, samples: int, batch_size: int) -> Outcome:
        """See `sizes`."""
        self.sizes = samples, batch_size
        return Outcome()

    def finished(self, worker: int, step: int) -> Outcome:
        """The worker has been answered all pushes of this step of its own, and of those before."""
        if worker in self.lost:  # and others have these shares
            return Outcome()
        for share in [
            share for share, (holder, leased_at) in self.open.items() if holder == worker and leased_at <= step
        ]:
            del self.open[share]
            if self.sizes:
                self.samples[worker] = self.samples.get(worker, 0) + samples_of_share(share, *self.sizes, self.workers)
        return self._serve_waiting()

    def lose(self, worker: int) -> Outcome:
        """The worker is gone for good: others take the shares that it had."""
        self.lost.add(worker)
        for share in [share for share, (holder, _) in self.open.items() if holder == worker]:
            del self.open[share]
            heapq.heappush(self.returned, share)
        self.waiting = [waiting for waiting in self.waiting if waiting[0] != worker]
        return self._serve_waiting()

    def state(self) -> tuple[Any, dict[str, Any]]:
        """See Part."""
        return vars(self), {}

    def restore(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """See Part."""
        vars(self).update(plain)

    @property
    def reached(self) -> int:
        """The number after that of the last share that was leased."""
        return max(following - len(self.next) + 1 for following in self.next)

    def _slot(self, worker: int) -> int | None:
        """In `next`, from where the worker gets a share; None where none is left for it."""
        slots = [worker, *sorted(self.lost)] if self.fixed else [0]
        return next((slot for slot in slots if self.next[slot] < self.end), None)

    def _give(self, worker: int, step: int, lines: list[tuple[int, int, int]]) -> int | None:
        if given := [share for share, lease in self.open.items() if lease == (worker, step)]:
            return given[0]
        if self.returned:
            share = heapq.heappop(self.returned)
        elif (slot := self._slot(worker)) is not None:
            share = self.next[slot]
            self.next[slot] += len(self.next)
        else:
            return None
        self.open[share] = worker, step
        lines.append((worker, step, share))
        return share

    def _serve_waiting(self) -> Outcome:
        """Answer those who wait, in the order they came in, as far as there is an answer."""
        replies, lines = {}, list[tuple[int, int, int]]()
        for worker, step in list(self.waiting):
            is_over = not self.open and min(self.next) >= self.end
            is_held = (worker, step) in self.open.values()
            if self.returned or is_held or is_over or self._slot(worker) is not None:
                self.waiting.remove((worker, step))
                replies[worker] = self._give(worker, step, lines), self.reached
        return Outcome(replies, lines)
