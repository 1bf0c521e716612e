"""A discrete-event simulator: an event loop, processes that wait, and resources that serve them.

A process is a generator. It yields what it waits for: a function that takes what is to be called
then, for example `partial(loop.after, seconds)`. A resource may stand for several that are alike;
`times` says for how many.
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
    """Runs a process until it waits for something, or to its end."""
    wait = next(process, None)
    if wait:
        wait(partial(go_on, process))


class Join:
    """A function that calls `then` when it has been called `calls` times. More calls do nothing."""

    def __init__(self, calls: int, then: Then) -> None:
        self.calls = calls
        self.then = then

    def __call__(self) -> None:
        self.calls -= 1
        if not self.calls:
            self.then()


class EventLoop:
    """The simulated time, and a heap of what happens next.

    Attributes:
        now: seconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, then: Then) -> None:
        """Calls `then` so many simulated seconds from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Handles events in the order of time until `is_over()` or none is left."""
        while self._events and not is_over():
            self.now, _, then = heapq.heappop(self._events)
            then()


class SharedLink:
    """One direction of a link, which carries one message at a time at full rate.

    The connection that is served next is drawn, since TCP shares a link unevenly. The messages of a
    connection keep their order.
    """

    def __init__(self, loop: EventLoop, draw: random.Random) -> None:
        self.loop = loop
        self.draw = draw
        self._waiting: dict[Hashable, deque[tuple[float, Then, Then]]] = {}
        # with a message that waits
        self._connections: list[Hashable] = []
        self._busy = False

    def take(self, connection: Hashable, seconds: float, begins: Then, ends: Then) -> None:
        """Queues a message that occupies the link for so many seconds.

        Args:
            begins: called when the message's first byte leaves.
            ends: called when the message's last byte is through.
        """
        waiting = self._waiting.setdefault(connection, deque())
        if not waiting:
            self._connections.append(connection)
        waiting.append((seconds, begins, ends))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        """Begins with the next message, if any waits."""
        self._busy = bool(self._connections)
        if not self._busy:
            return
        number = 0
        if len(self._connections) > 1:
            number = int(self.draw.random() * len(self._connections))
        waiting = self._waiting[self._connections[number]]
        seconds, begins, ends = waiting.popleft()
        if not waiting:
            self._connections[number] = self._connections[-1]
            self._connections.pop()
        begins()
        self.loop.after(seconds, partial(self._through, ends))

    def _through(self, ends: Then) -> None:
        self._next()
        ends()


class Processors:
    """The cores of some hosts, which all threads there share evenly.

    Each thread runs at min(1, cores / running threads). This is egalitarian processor sharing in
    virtual time: the processor seconds that a thread has had since the beginning are the same for
    all threads, so that work ends in the order of what it needs.

    Attributes:
        attained: processor seconds that each thread has had since the beginning.
        since: the time up to which `attained` counts.
        running: the number of threads that run.
    """

    def __init__(self, loop: EventLoop, cores: float) -> None:
        self.loop = loop
        self.cores = cores
        self.attained = 0.0
        self.since = 0.0
        self.running = 0.0
        self._work: list[tuple[float, int, float, Then]] = []
        self._numbers = itertools.count()
        # The number of the planned end. An event with an older number is void.
        self._round = 0

    def work(self, seconds: float, times: float, then: Then) -> None:
        """Has `times` threads compute for so many processor seconds each, then calls `then`."""
        if seconds <= 0:
            self.loop.after(0, then)
            return
        self._advance()
        self.running += times
        heapq.heappush(self._work, (self.attained + seconds, next(self._numbers), times, then))
        self._plan()

    def _rate(self) -> float:
        """Returns the processor seconds that a thread has in a second."""
        return min(1.0, self.cores / self.running) if self.running > 0 else 1.0

    def _advance(self) -> None:
        """Counts what the threads have attained up to now."""
        self.attained += (self.loop.now - self.since) * self._rate()
        self.since = self.loop.now

    def _plan(self) -> None:
        """Schedules the end of the work that needs least."""
        self._round += 1
        if self._work:
            seconds = max(0.0, self._work[0][0] - self.attained) / self._rate()
            self.loop.after(seconds, partial(self._end, self._round))

    def _end(self, number: int) -> None:
        if number != self._round:
            return
        self._advance()
        # Rounding may have left less than the work needs.
        self.attained = max(self.attained, self._work[0][0])
        ended = []
        while self._work and self._work[0][0] <= self.attained:
            _, _, times, then = heapq.heappop(self._work)
            self.running -= times
            ended.append(then)
        if not self._work:
            # Rounding leaves no remainder.
            self.running = 0.0
        self._plan()
        for then in ended:
            then()


class IoThread:
    """The io thread of each of `times` alike processes, which does one thing after the other on
    shared processors.
    """

    def __init__(self, processors: Processors, times: float) -> None:
        self.processors = processors
        self.times = times
        # The first is what the thread does now.
        self._queue: deque[tuple[float, Then]] = deque()

    def do(self, seconds: float, then: Then) -> None:
        """Queues work of so many processor seconds, and calls `then` when it is done."""
        self._queue.append((seconds, then))
        if len(self._queue) == 1:
            go_on(self._work())

    def _work(self) -> Process:
        while self._queue:
            seconds, then = self._queue[0]
            yield partial(self.processors.work, seconds, self.times)
            then()
            self._queue.popleft()
