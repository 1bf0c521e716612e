"""The workers as a server knows them: who is there, who joins, and what they agree on.

This is plain state, and knows nothing of networks.

Each life of a worker has a number, which is never given twice: workers that are there at the start
have 0 … N - 1, and a worker that joins later, in place of a lost one or beside the others, the next
number. So a late message of a former life is nobody's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hvdtrain.base.errors import Failure
from hvdtrain.job.wire.messages import UNLIKE, refuse_if

Answers = dict[Any, Any]  # by waiter: see Roster


class JoinPoint(NamedTuple):
    """The point at which workers can join a round, from one sum until the next.

    Attributes:
        sums: how many sums there were before.
        began: when the round began, of time.monotonic().
        state: what the workers have come to, of plain types and tensors.
    """

    sums: int
    began: float
    state: Any


class Joined(NamedTuple):
    """A worker that has joined. The others wait for it from now on.

    Attributes:
        member: the worker's number.
        point: where it joins.
    """

    member: int
    point: JoinPoint


@dataclass(eq=False)
class Roster:
    """Which workers are there, and what they add up together.

    A sum is over the workers that are there. It is done when each of them has given its summand;
    a worker that is lost later stays in the sums that it was in.

    Answers go to (number of the sum, worker), to ("leave", worker), and to (process, endpoint) of a
    worker that joins.

    Attributes:
        workers: how many workers there were at the start.
        present: the workers that are there.
        lost: the workers that are lost.
        departed: the workers that left in order, while the others go on.
        next: the number of the next worker that joins.
        summands: of each sum, the summands by worker.
        sums: the sums that are done, of late.
        kinds: of each sum, whether workers asked for the summands as rows.
        point: where the last round was opened for joining.
        is_open: whether the round that began at the point lets workers join: its sum is not done.
        joining: the process and endpoint of each worker that wants to join.
        notes: for the worker that leads: a text by slot (0 or 1) and worker.
        began: whether the workers have the first weights.
        is_over: whether all workers have ended.
        have_left: the workers that wait for the end, or have heard of it.
        endpoint: where this server is reached.
        others: where the other ranks are reached.
        shares_memory: whether tensors travel by memory that the host's processes share.
        returned: when this server was killed and came back: see runs.schema.Return.
        lost_updates: how many updates of each bucket kills have cost.
    """

    workers: int
    present: set[int] = field(init=False)
    lost: set[int] = field(default_factory=set)
    departed: set[int] = field(default_factory=set)
    next: int = field(init=False)
    summands: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    kinds: dict[int, set[bool]] = field(default_factory=dict)
    point: JoinPoint | None = None
    is_open: bool = False
    joining: list[tuple[int, str]] = field(default_factory=list)
    notes: dict[int, dict[int, str]] = field(default_factory=dict)
    began: bool = False
    is_over: bool = False
    have_left: set[int] = field(default_factory=set)
    endpoint: str = ""
    others: dict[int, str] = field(default_factory=dict)
    shares_memory: bool = False
    returned: list[dict[str, Any]] = field(default_factory=list)
    lost_updates: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.present = set(range(self.workers))
        self.next = self.workers

    def add(self, worker: int, number: int, values: torch.Tensor, as_rows: bool = False) -> Answers:
        """Takes a worker's summand. The answers are the sum, of the same shape and dtype, or a
        Failure if the workers have given summands of different shapes or kinds.

        Summands are added in the order of the workers, so that the same summands give the same
        bits. A summand that comes again, since its worker has waited for long, counts once.

        Args:
            worker: the worker's number.
            number: the number of the sum, from 1.
            values: the summand.
            as_rows: do not add the summands up: the answers have them as rows, in the order of the
                workers.

        Raises:
            Failure: the worker is lost.
        """
        refuse_if(worker not in self.present)
        # All workers have that sum: each comes to a sum when it is through the last but one.
        self.sums.pop(number - 4, None)
        if number in self.sums:
            return {(number, worker): self.sums[number]}
        self.kinds.setdefault(number, set()).add(as_rows)
        self.summands.setdefault(number, {})[worker] = values
        return self._finish(number)

    def missing(self, worker: int, number: int) -> list[int]:
        """Returns the workers that a sum waits for.

        Only the first of the workers that wait is told, and tells the user; the others get an empty
        list.
        """
        summands = self.summands.get(number, {})
        if worker != min(summands, default=None):
            return []
        return sorted(self.present - summands.keys())

    def open_for_joining(self, sums: int, state: Any, now: float) -> Answers:
        """Lets workers join until the next sum is done.

        Args:
            sums: how many sums the workers have been through.
            state: what a worker that joins has to know: see JoinPoint.
            now: time.monotonic().

        Returns:
            The answers to workers that wanted to join.
        """
        if sums + 1 in self.sums:
            return {}
        self.point = JoinPoint(sums, now, state)
        self.is_open = True
        return self._let_in()

    def join(self, endpoint: str, pid: int) -> Answers:
        """Lets a worker join, in the next round at the latest. Its answer is Joined."""
        self.joining.append((pid, endpoint))
        return self._let_in()

    def close(self, why: str) -> Answers:
        """Refuses whoever still wants to join."""
        joining = self.joining
        self.joining = []
        return {waiter: Failure(why) for waiter in joining}

    def admit(self, worker: int) -> None:
        """Counts a new worker in.

        Raises:
            Failure: the worker is lost already.
        """
        refuse_if(worker in self.lost)
        self.present.add(worker)

    def depart(self, worker: int) -> None:
        """Takes note that a worker leaves in order."""
        self.departed.add(worker)

    def lose(self, worker: int) -> Answers:
        """Goes on without a worker. The answers are sums that waited for it alone."""
        self.lost.add(worker)
        self.present.discard(worker)
        if not self.present and self.point:
            # Nobody knows what was decided since the last round was opened: it begins again.
            self.summands.clear()
            self.kinds.clear()
            self.sums.clear()
            self.is_open = True
        answers: Answers = {}
        for number in list(self.summands):
            answers |= self._finish(number)
        return answers | self._let_in()

    def note(self, slot: int, worker: int, value: str) -> None:
        """Keeps a worker's note for the worker that leads, in place of the slot's former one."""
        self.notes.setdefault(slot, {})[worker] = value

    def leave(self, worker: int) -> Answers:
        """Takes note that a worker is done. It is answered when all are."""
        self.have_left.add(worker)
        return {("leave", worker): None} if self.is_over else {}

    def end(self) -> Answers:
        """Takes note that all workers have ended."""
        self.is_over = True
        return {("leave", worker): None for worker in self.have_left}

    def know(self, attributes: Mapping[str, Any]) -> None:
        """Sets attributes that are about the server itself."""
        vars(self).update(attributes)

    def lose_updates(self, bucket: int, updates: int) -> None:
        """Takes note that so many updates of a bucket were lost when this server was killed."""
        self.lost_updates[bucket] = updates
        self.returned[-1]["lost_updates"] = sum(self.lost_updates.values())

    def take_lines(self) -> Sequence[tuple[Any, ...]]:
        """See Part: there is no ledger of this."""
        return ()

    def state(self) -> tuple[Any, dict[str, Any]]:
        """See Part. A worker that wants to join or to leave calls again."""
        return vars(self) | {"joining": [], "have_left": set()}, {}

    def restore(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """See Part."""
        vars(self).update(plain)

    def _let_in(self) -> dict[Any, Joined]:
        """Gives a number to each worker that can join now."""
        answers = {}
        while self.is_open and self.point and self.joining:
            waiter = self.joining.pop(0)
            answers[waiter] = Joined(self.next, self.point)
            self.present.add(self.next)
            self.next += 1
        return answers

    def _finish(self, number: int) -> Answers:
        """Does a sum that waits for nobody any more; returns it for each worker in it.

        If the summands have different shapes or kinds, the answer to each worker is a Failure.
        """
        summands = self.summands[number]
        if not self.present <= summands.keys():
            return {}
        del self.summands[number]
        if self.point and number > self.point.sums:
            self.is_open = False
        kinds = self.kinds.pop(number)
        shapes = {values.shape for values in summands.values()}
        if len(shapes) > 1 or len(kinds) > 1:
            refused = Failure(UNLIKE)
            return {(number, worker): refused for worker in summands}
        rows = torch.stack([summands[worker] for worker in sorted(summands)])
        self.sums[number] = rows if True in kinds else rows.sum(0)
        return {(number, worker): self.sums[number] for worker in summands}
