"""The workers as a server knows them: who is there, who joins, and what they add up and write down together. It is
plain state, and knows nothing of networks.

Each life of a worker has a number of its own, never given twice: those that are there at the start have 0 … N - 1, and
who joins later, in place of a lost one or beside the others, the next. So what comes late of a former life is nobody's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hvdtrain.errors import Failure
from hvdtrain.wire.messages import Outcome, at_once, refuse_if


class JoinPoint(NamedTuple):
    """What somebody who joins has to know to be where the others are, from one sum until the next."""

    sums: int  # how many there were before
    began: float  # time.monotonic()
    state: Any  # what the workers have come to, of plain types and tensors


class Joined(NamedTuple):
    """Somebody who wanted to join has this number, and is waited for from now on."""

    member: int
    point: JoinPoint


@dataclass(eq=False)
class Roster:
    """Which of the workers are still there, and what they add up together.

    A sum is over the workers that are there: it is done when each of them has given its summand, and whoever is lost
    later stays in the sums that it was in.

    Replies go to (number of the sum, worker), to ("leave", worker), and to (process, endpoint) of one that joins.
    """

    workers: int  # how many there were at the start
    present: set[int] = field(init=False)
    lost: set[int] = field(default_factory=set)
    departed: set[int] = field(default_factory=set)  # in order, while the others go on
    next: int = field(init=False)  # the number of whoever joins next
    summands: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)  # number of a sum -> worker -> summand
    sums: dict[int, torch.Tensor] = field(default_factory=dict)  # those that are done, of late
    kept_as_rows: set[int] = field(default_factory=set)  # sums whose summands are not added up
    point: JoinPoint | None = None
    is_open: bool = False  # whether the round that began at the point lets others join: its sum is still to be done
    joining: list[tuple[int, str]] = field(default_factory=list)
    notes: dict[int, dict[int, str]] = field(default_factory=dict)  # for the one that leads: by slot (0, 1), worker
    began: bool = False  # workers have the first weights
    is_over: bool = False  # all workers have ended
    have_left: set[int] = field(default_factory=set)  # those that wait for that, or have heard of it
    # Of the server itself: where it is reached, and the others, by the number that they are called by; whether tensors
    # go by memory that its host shares; how often it was killed and came back (see runs.schema.Return), and how many
    # updates of each bucket that has cost.
    endpoint: str = ""
    others: dict[int, str] = field(default_factory=dict)
    shares_memory: bool = False
    returned: list[dict[str, Any]] = field(default_factory=list)
    lost_updates: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.present, self.next = set(range(self.workers)), self.workers

    def add(self, worker: int, number: int, values: torch.Tensor, as_rows: bool = False) -> Outcome:
        """A worker's summand of its sum of that number, from 1; replies are the sum, of the same shape and dtype.

        Summands are added in the order of the workers, so that the same summands give the same bits. One that comes
        again, since the worker has waited for long, counts once.

        Args:
            as_rows: do not add them up: the reply has them as rows, in that order.

        Raises:
            Failure: the worker had been given up.
        """
        refuse_if(worker not in self.present)
        self.sums.pop(number - 4, None)  # all have it: each comes to a sum when it is through the last but one
        if number in self.sums:
            return Outcome({(number, worker): self.sums[number]}, asked=(number, worker))
        if as_rows:
            self.kept_as_rows.add(number)
        self.summands.setdefault(number, {})[worker] = values
        return Outcome(self._finish(number), asked=(number, worker))

    def missing(self, worker: int, number: int) -> Outcome:
        """The workers that a sum still waits for, as this worker asks; nobody where it is done, and given to who asks
        for it again.

        Raises:
            Failure: the worker had been given up: it would wait for others without end.
        """
        refuse_if(worker not in self.present)
        return at_once(sorted(self.present - set(self.summands[number])) if number in self.summands else [])

    def open_for_joining(self, sums: int, state: Any, now: float) -> Outcome:
        """The workers have been through so many sums, and train until the next: whoever joins before that is done is
        with them.
        """
        if sums + 1 in self.sums:
            return Outcome()
        self.point, self.is_open = JoinPoint(sums, now, state), True
        return Outcome(self._let_in())

    def join(self, endpoint: str, pid: int) -> Outcome:
        """Somebody wants to join. The reply, in the next round at the latest, is what they are: see Joined."""
        self.joining.append((pid, endpoint))
        return Outcome(self._let_in(), asked=(pid, endpoint))

    def close(self, why: str) -> Outcome:
        """Whoever still wants to join is too late."""
        joining, self.joining = self.joining, []
        return Outcome({worker: Failure(why) for worker in joining})

    def admit(self, worker: int) -> Outcome:
        """A worker is there. Failure if it is lost already."""
        refuse_if(worker in self.lost)
        self.present.add(worker)
        return Outcome()

    def depart(self, worker: int) -> Outcome:
        """The worker leaves in order."""
        self.departed.add(worker)
        return Outcome()

    def lose(self, worker: int) -> Outcome:
        """The worker is gone for good."""
        self.lost.add(worker)
        self.present.discard(worker)
        if not self.present and self.point:  # nobody knows what was decided since the last round was opened
            self.summands.clear()
            self.sums.clear()
            self.is_open = True
        replies: dict[Any, Any] = {}
        for number in list(self.summands):
            replies |= self._finish(number)
        return Outcome(replies | self._let_in())

    def note(self, slot: int, worker: int, value: str) -> Outcome:
        """Write down what a worker has for the one that leads, in place of what it had in that slot."""
        self.notes.setdefault(slot, {})[worker] = value
        return Outcome()

    def leave(self, worker: int) -> Outcome:
        """The worker is done; it is told when all are."""
        self.have_left.add(worker)
        return Outcome({("leave", worker): None} if self.is_over else {}, asked=("leave", worker))

    def end(self) -> Outcome:
        """All workers have ended."""
        self.is_over = True
        return Outcome({("leave", worker): None for worker in self.have_left})

    def know(self, of_server: Mapping[str, Any]) -> Outcome:
        """These attributes, which are of the server itself, are so from now on."""
        vars(self).update(of_server)
        return Outcome()

    def lose_updates(self, bucket: int, updates: int) -> Outcome:
        """So many have been lost of a bucket, when this server was killed."""
        self.lost_updates[bucket] = updates
        self.returned[-1]["lost_updates"] = sum(self.lost_updates.values())
        return Outcome()

    def state(self) -> tuple[Any, dict[str, Any]]:
        """See Part. Who wants to join or to leave asks again."""
        return vars(self) | {"joining": [], "have_left": set()}, {}

    def restore(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """See Part."""
        vars(self).update(plain)

    def _let_in(self) -> dict[Any, Joined]:
        """Give those a number who can join now."""
        replies = {}
        while self.is_open and self.point and self.joining:
            replies[self.joining.pop(0)] = Joined(self.next, self.point)
            self.present.add(self.next)
            self.next += 1
        return replies

    def _finish(self, number: int) -> dict[Any, torch.Tensor]:
        """Do the sum, if it waits for nobody any more."""
        summands = self.summands[number]
        if not self.present <= summands.keys():
            return {}
        del self.summands[number]
        if self.point and number > self.point.sums:
            self.is_open = False
        rows = torch.stack([summands[worker] for worker in sorted(summands)])
        self.sums[number] = rows if number in self.kept_as_rows else rows.sum(0)
        self.kept_as_rows.discard(number)
        return {(number, worker): self.sums[number] for worker in summands}
