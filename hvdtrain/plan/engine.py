"""Discrete events: a heap of what happens next, links that serve in order, and processors that are shared.

A resource can stand for several alike: work then says how many do it at once (`times`).
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Hashable

Then = Callable[[], None]


class Clock:
    """
    Attributes:
        now: seconds since the simulation began.
        spans: with tracing, what was done: (track, name, begin, end).
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.spans: list[tuple[str, str, float, float]] | None = None
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def at(self, time: float, then: Then) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), then))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let things happen until it is over."""
        while self._events and not is_over():
            self.now, _, then = heapq.heappop(self._events)
            then()

    def traced(self, track: str, name: str, began: float, then: Then) -> Then:
        """`then`, which also writes down what ends there."""

        def end() -> None:
            self.span(track, name, began)
            then()

        return end

    def span(self, track: str, name: str, began: float) -> None:
        """With tracing, write down what ends here."""
        if self.spans is not None:
            self.spans.append((track, name, began, self.now))


class Link:
    """One direction of a link: a message at a time, at full rate.

    Messages of a connection keep their order. Between connections there is none: TCP shares a link among them, but
    unevenly, so that a message is through while another that began as early is not. Whose is next is drawn.
    """

    def __init__(self, clock: Clock, draw: random.Random) -> None:
        self.clock, self.draw = clock, draw
        self._waiting: dict[Hashable, deque[tuple[float, Then, Then]]] = {}
        self._connections: list[Hashable] = []  # those that have messages waiting
        self._busy = False

    def take(self, connection: Hashable, seconds: float, begins: Then, ends: Then) -> None:
        """Serve a message for so long; calls `begins` when its first byte leaves, `ends` when its last is through."""
        waiting = self._waiting.setdefault(connection, deque())
        if not waiting:
            self._connections.append(connection)
        waiting.append((seconds, begins, ends))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._connections)
        if not self._busy:
            return
        number = int(self.draw.random() * len(self._connections)) if len(self._connections) > 1 else 0
        waiting = self._waiting[self._connections[number]]
        seconds, begins, ends = waiting.popleft()
        if not waiting:
            self._connections[number] = self._connections[-1]
            self._connections.pop()
        begins()

        def through() -> None:
            self._next()
            ends()

        self.clock.at(self.clock.now + seconds, through)


class Processors:
    """Cores that all threads of some hosts share evenly: egalitarian processor sharing in virtual time.

    Every thread runs at min(1, cores / threads that run), so that `attained`, the processor seconds that each running
    thread has had since the beginning, is the same for all and work ends in the order of what it needs.
    """

    def __init__(self, clock: Clock, cores: float) -> None:
        self.clock, self.cores = clock, cores
        self.attained, self.since = 0.0, 0.0
        self.running = 0.0
        self._work: list[tuple[float, int, float, Then]] = []
        self._numbers = itertools.count()
        self._round = 0  # of planned ends: an older one is void

    def work(self, seconds: float, times: float, then: Then) -> None:
        """So many threads at once compute for so long."""
        if seconds <= 0:
            self.clock.at(self.clock.now, then)
            return
        self._advance()
        self.running += times
        heapq.heappush(self._work, (self.attained + seconds, next(self._numbers), times, then))
        self._plan()

    def _rate(self) -> float:
        return min(1.0, self.cores / self.running) if self.running > 0 else 1.0

    def _advance(self) -> None:
        self.attained += (self.clock.now - self.since) * self._rate()
        self.since = self.clock.now

    def _plan(self) -> None:
        self._round += 1
        if self._work:
            number = self._round
            end = self.clock.now + max(0.0, self._work[0][0] - self.attained) / self._rate()
            self.clock.at(end, lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number != self._round:
            return
        self._advance()
        self.attained = max(self.attained, self._work[0][0])  # rounding
        ended = []
        while self._work and self._work[0][0] <= self.attained:
            _, _, times, then = heapq.heappop(self._work)
            self.running -= times
            ended.append(then)
        if not self._work:
            self.running = 0.0  # no remainder of rounding
        self._plan()
        for then in ended:
            then()


class Thread:
    """What one thread of each of some processes does, one thing after the other, on shared processors.

    Args:
        times: how many such threads there are, all doing the same.
    """

    def __init__(self, processors: Processors, times: float) -> None:
        self.processors, self.times = processors, times
        self._queue: deque[tuple[float, Then]] = deque()
        self._busy = False

    def do(self, seconds: float, then: Then) -> None:
        self._queue.append((seconds, then))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not self._queue:
            self._busy = False
            return
        self._busy = True
        seconds, then = self._queue.popleft()

        def done() -> None:
            then()
            self._next()

        self.processors.work(seconds, self.times, done)
