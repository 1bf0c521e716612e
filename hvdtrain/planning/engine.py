"""A discrete-event simulator: an event loop, processes that wait, and resources that serve them.

A process is a generator. It yields what it waits for: a function that takes what is to be called
then, for example `partial(loop.after, seconds)`. A resource may stand for several that are alike;
`times` says for how many.
"""

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Hashable
from functools import partial
from heapq import heappop, heappush

Then = Callable[[], object]
Wait = Callable[[Then], object]
Process = Generator[Wait, None, None]


def go_on(process: Process) -> None:
    """Runs a process until it waits for something, and on when that comes, to its end."""

    def resume() -> None:
        wait = next(process, None)
        if wait:
            wait(resume)

    resume()


class Join:
    """A function that calls `then` when it has been called `calls` times. More calls do nothing."""

    __slots__ = ("calls", "then")

    def __init__(self, calls: int, then: Then) -> None:
        self.calls = calls
        self.then = then

    def __call__(self) -> None:
        self.calls -= 1
        if not self.calls:
            self.then()


class EventLoop:
    """The simulated time, and a heap of what happens next.

    Of events at the same time, the one with the least number is handled first. The resources here
    push their events themselves, because a call for each event takes time.

    Attributes:
        now: seconds since the simulation began.
        events: the heap: when something happens, the number of the event, and what is called.
        numbers: of the events.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, Then]] = []
        self.numbers = itertools.count()
        self._is_stopped = False

    def after(self, seconds: float, then: Then) -> None:
        """Calls `then` so many simulated seconds from now."""
        heappush(self.events, (self.now + seconds, next(self.numbers), then))

    def run(self) -> None:
        """Handles events in the order of time until `stop()` is called or none is left."""
        events = self.events
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

    Args:
        is_more_even: whether two of the waiting connections are drawn, of which the one that has
            waited longer is served.
    """

    def __init__(self, loop: EventLoop, draw: random.Random, is_more_even: bool = False) -> None:
        self.loop = loop
        self.is_more_even = is_more_even
        self._random = draw.random
        self._messages: dict[Hashable, deque[tuple[float, Then, Then]]] = {}
        # The messages of each connection with one that waits. The one that waits longest is first.
        self._waiting: list[deque[tuple[float, Then, Then]]] = []
        self._busy = False
        # What the message that occupies the link calls at its end.
        self._ends: Then = lambda: None

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
        connections = len(self._waiting)
        self._busy = connections > 0
        if not connections:
            return
        number = 0
        if connections > 1:
            number = int(self._random() * connections)
            if self.is_more_even:
                number = min(number, int(self._random() * connections))
        messages = self._waiting.pop(number)
        seconds, begins, ends = messages.popleft()
        if messages:
            self._waiting.append(messages)
        self._ends = ends
        begins()
        loop = self.loop
        heappush(loop.events, (loop.now + seconds, next(loop.numbers), self._through))

    def _through(self) -> None:
        ends = self._ends
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
        # When the work that needs least ends, and the number of that event.
        self._ends_at = 0.0
        self._end_number = -1
        # When this looks next whether work has ended, and the number of that event. It may be too
        # early, since further work makes all threads slower.
        self._looks_at = math.inf
        self._look_number = -1

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
        """Plans the end of the work that needs least, at the rate that threads have from now on."""
        running = self.running
        self._rate = self.cores / running if running > self.cores else 1.0
        if not self._work:
            return
        loop = self.loop
        needed = self._work[0][0] - self.attained
        self._ends_at = loop.now + needed / self._rate if needed > 0 else loop.now
        self._end_number = next(loop.numbers)
        if self._ends_at < self._looks_at:
            self._look_later()

    def _look_later(self) -> None:
        """Looks when the work that needs least is to end."""
        number = self._end_number
        self._looks_at = self._ends_at
        self._look_number = number
        look: Then = partial(self._look, number)
        heappush(self.loop.events, (self._ends_at, number, look))

    def _look(self, number: int) -> None:
        """Ends work if this is the planned event, and else looks again.

        Args:
            number: of this event. If another look was planned since, it does nothing.
        """
        if number != self._look_number:
            return
        if number != self._end_number:
            self._look_later()
            return
        self._looks_at = math.inf
        self._end()

    def _end(self) -> None:
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
            self._begin(seconds)

    def _begin(self, seconds: float) -> None:
        self.processors.work(seconds, self.times, self._done)

    def _done(self) -> None:
        _, then = self._queue[0]
        then()
        self._queue.popleft()
        if self._queue:
            seconds, _ = self._queue[0]
            self._begin(seconds)
