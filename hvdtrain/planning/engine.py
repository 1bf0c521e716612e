"""Discrete events: a heap of what happens next, processes that wait, links that serve in order, shared processors.

A process is a generator that yields what it waits for: a function that is given what goes on after it, as
`partial(clock.after, seconds)`. A resource can stand for several alike, `times` says for how many.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Hashable
from functools import partial

Then = Callable[[], object]
Wait = Callable[[Then], object]
Process = Generator[Wait, None, None]


def go_on(process: Process) -> None:
    """Let a process do what it does until it waits for something, or to its end."""
    wait = next(process, None)
    if wait:
        wait(partial(go_on, process))


class Join:
    """Calls `then` when it has been called so many times; more calls do nothing."""

    def __init__(self, calls: int, then: Then) -> None:
        self.calls, self.then = calls, then

    def __call__(self) -> None:
        self.calls -= 1
        if not self.calls:
            self.then()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0  # seconds since the simulation began
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, then: Then) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let things happen until it is over."""
        while self._events and not is_over():
            self.now, _, then = heapq.heappop(self._events)
            then()


class Link:
    """One direction of a link: a message at a time, at full rate. Whose connection is next is drawn, since TCP shares a
    link unevenly.
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
        self.clock.after(seconds, partial(self._through, ends))

    def _through(self, ends: Then) -> None:
        self._next()
        ends()


class Processors:
    """Cores that all threads of some hosts share evenly: each runs at min(1, cores / threads that run).

    `attained`, the processor seconds that each has had since the beginning, is the same for all: work ends in the order
    of what it needs (egalitarian processor sharing in virtual time).
    """

    def __init__(self, clock: Clock, cores: float) -> None:
        self.clock, self.cores = clock, cores
        self.attained = self.since = self.running = 0.0
        self._work: list[tuple[float, int, float, Then]] = []
        self._numbers = itertools.count()
        self._round = 0  # of planned ends: an older one is void

    def work(self, seconds: float, times: float, then: Then) -> None:
        """So many threads at once compute for so long."""
        if seconds <= 0:
            self.clock.after(0, then)
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
            seconds = max(0.0, self._work[0][0] - self.attained) / self._rate()
            self.clock.after(seconds, partial(self._end, self._round))

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
    """What one thread of each of so many processes does, one thing after the other, on shared processors."""

    def __init__(self, processors: Processors, times: float) -> None:
        self.processors, self.times = processors, times
        self._queue: deque[tuple[float, Then]] = deque()  # the first is what it does

    def do(self, seconds: float, then: Then) -> None:
        self._queue.append((seconds, then))
        if len(self._queue) == 1:
            go_on(self._work())

    def _work(self) -> Process:
        while self._queue:
            seconds, then = self._queue[0]
            yield partial(self.processors.work, seconds, self.times)
            then()
            self._queue.popleft()
