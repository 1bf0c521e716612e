"""The order in which buckets are sent to one server, or around a ring.

This is plain state, without locks. `planning` simulates workers with it.
"""

from collections.abc import Callable
from heapq import heappop, heappush


class SendQueue:
    """The buckets that wait to be sent, and how much is under way.

    Of the buckets that wait, the one that forward needs first goes first, as long as there is room.
    Without room one more may be under way: the one that has waited longest, for which other workers
    may wait (see Exchange).

    Args:
        room: the most bytes that are under way at once.
        size_of: returns the bytes of a bucket, given its number. Numbers are in the order in which
            forward needs the buckets.

    Attributes:
        waiting: the numbers of the buckets that wait, in the order in which they came.
        under_way: the bytes that are sent and not answered.
        over_limit: the number of the bucket that is under way without room; None: there is none.
    """

    def __init__(self, room: float, size_of: Callable[[int], float]) -> None:
        self.room = room
        self.size_of = size_of
        self.clear()

    def clear(self) -> None:
        """Forgets what waits and what is under way."""
        self.waiting: dict[int, None] = {}
        # A heap of the buckets that wait, and of some that no longer do.
        self._first: list[int] = []
        self.under_way: float = 0
        self.over_limit: int | None = None

    def add(self, number: int) -> None:
        """Adds a bucket to those that wait to be sent."""
        self.waiting[number] = None
        heappush(self._first, number)

    def next_with_room(self) -> int | None:
        """Returns the number of the bucket that can be sent now; None where there is none."""
        if not self.waiting:
            self._first.clear()
            return None
        while self._first[0] not in self.waiting:
            heappop(self._first)
        first = self._first[0]
        if self.under_way and self.under_way + self.size_of(first) > self.room:
            return None
        return first

    def next_over_limit(self) -> int | None:
        """Returns the number of the bucket that can be sent without room; None: none can."""
        if self.over_limit is not None:
            return None
        return next(iter(self.waiting), None)

    def send(self, number: int) -> None:
        """Takes note that a bucket that has waited is sent."""
        if number != self.next_with_room():
            self.over_limit = number
        del self.waiting[number]
        self.under_way += self.size_of(number)

    def answered(self, number: int) -> None:
        """Takes note that a bucket was answered."""
        self.under_way -= self.size_of(number)
        if self.over_limit == number:
            self.over_limit = None
