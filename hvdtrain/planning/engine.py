"""A discrete-event simulator: an event loop, processes that wait, and resources that serve them.

A process is a generator. It yields what it waits for: a function that takes what is to be called
then, for example `partial(loop.after, seconds)`. A resource may stand for several that are alike;
`times` says for how many.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Hashable
from functools import partial
from heapq import heappop, heappush

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
        self._is_stopped = False

    def after(self, seconds: float, then: Then) -> None:
        """Calls `then` so many simulated seconds from now."""
        heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def run(self) -> None:
        """Handles events in the order of time until `stop()` is called or none is left."""
        events = self._events
        while events and not self._is_stopped:
            self.now, _, then = heappop(events)
            then()

    def stop(self) -> None:
        """Ends `run` after what happens now."""
        self._is_stopped = True


class SharedLink:
    """One direction of a link, which carries one message at a time at full rate.

    The connection that is served next is drawn, since TCP shares a link unevenly. The messages of a
    connection keep their order.
    """

    def __init__(self, loop: EventLoop, draw: random.Random) -> None:
        self.loop = loop
        self.draw = draw
        self._messages: dict[Hashable, deque[tuple[float, Then, Then]]] = {}
        # The messages of each connection with one that waits.
        self._waiting: list[deque[tuple[float, Then, Then]]] = []
        self._busy = False

    def take(self, connection: Hashable, seconds: float, begins: Then, ends: Then) -> None:
        """Queues a message that occupies the link for so many seconds.

        Args:
            begins: called when the message's first byte leaves.
            ends: called when the message's last byte is through.
        """
        messages = self._messages.get(connection)
        if messages is None:
            messages = self._messages[connection] = deque()
        if not messages:
            self._waiting.append(messages)
        messages.append((seconds, begins, ends))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        """Begins with the next message, if any waits."""
        waiting = self._waiting
        connections = len(waiting)
        self._busy = connections > 0
        if not connections:
            return
        number = int(self.draw.random() * connections) if connections > 1 else 0
        messages = waiting[number]
        seconds, begins, ends = messages.popleft()
        if not messages:
            waiting[number] = waiting[-1]
            waiting.pop()
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
        # The processor seconds that a thread has in a second.
        self._rate = 1.0
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
        heappush(self._work, (self.attained + seconds, next(self._numbers), times, then))
        self._plan()

    def _advance(self) -> None:
        """Counts what the threads have attained up to now."""
        now = self.loop.now
        self.attained += (now - self.since) * self._rate
        self.since = now

    def _plan(self) -> None:
        """Schedules the end of the work that needs least, at the rate that threads have from now on."""
        self._round += 1
        crowded = self.running > self.cores
        self._rate = self.cores / self.running if crowded else 1.0
        if self._work:
            seconds = max(0.0, self._work[0][0] - self.attained) / self._rate
            self.loop.after(seconds, partial(self._end, self._round))

    def _end(self, number: int) -> None:
        if number != self._round:
            return
        self._advance()
        # Rounding may have left less than the work needs.
        self.attained = max(self.attained, self._work[0][0])
        ended = []
        while self._work and self._work[0][0] <= self.attained:
            _, _, times, then = heappop(self._work)
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
