"""The order in which buckets are sent to one server, or around a ring.

This is plain state, without locks. `planning` simulates workers with it.
"""

import dataclasses
from collections.abc import Callable
from heapq import heappop, heappush

from hvdtrain.base.config.run_config import RunConfig

# Bytes of gradients that a worker has sent and no server has answered. Servers share the limit
# evenly, so that none waits while another is busy. All workers together have no more than that
# under way for each server, which may have to hold so much until others push.
UNDER_WAY = 48 * 2**20
# Each worker can have so many buckets under way to a server (up to 32 workers, and with no more
# servers than workers): one arrives, one waits for the pushes of other workers, and one is answered.
# With fewer the server's link receives and sends by turns.
BUCKETS_UNDER_WAY = 3
# The limit of a bucket's bytes is never lower: more buckets would cost a server too many messages.
LEAST_LIMIT = 2**19  # bytes


def largest_push(bucket: int, workers: int, under_way: int = UNDER_WAY) -> int:
    """Returns the bytes that a bucket has at most if it is pushed to servers.

    Args:
        bucket: the bytes that a bucket has at most where there are a few workers.
        workers: the number of workers.
        under_way: the bytes that all workers may have under way to a server.
    """
    in_turn = under_way // (BUCKETS_UNDER_WAY * workers)
    return min(bucket, max(in_turn, LEAST_LIMIT))


def with_used_buckets(config: RunConfig, workers: int) -> RunConfig:
    """Returns the configuration with the buckets that its job has, which may be smaller than asked."""
    if not config.servers:
        return config
    used = largest_push(4 * config.bucket_elements, workers)
    return dataclasses.replace(config, bucket_mb=used / 2**20)


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
