"""The wire by ZeroMQ: raw tensors with headers (`packing`), encrypted where there is a key.

Each rank listens with a ROUTER socket and calls each other rank by a DEALER socket (`sockets`). A
ZeroMQ socket is for one thread: one thread of each process owns all sockets, and other threads hand
it what they send. Threads of a pool encrypt and decrypt large tensors (`envelope`). The key is in
HVDTRAIN_WIRE_KEY, which `hvdtrain launch` sets. Without a key, ranks on one host go on in clear on
loopback, and ranks on several hosts refuse.
"""

import contextlib
import itertools
import math
import os
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from torch.futures import Future

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.network import VARIABLE, WIRE_KEY, own_address
from hvdtrain.base.world.place import World
from hvdtrain.job.wire.envelope import disclose, enclose
from hvdtrain.job.wire.heartbeat import wait_for_ranks, while_served
from hvdtrain.job.wire.messages import CONNECTION_ENDED, INLINE_BYTES, Push, no_answer
from hvdtrain.job.wire.noise import NotAuthentic
from hvdtrain.job.wire.packing import Frames, pack, receive, unpack
from hvdtrain.job.wire.requests import WATCH, Requests
from hvdtrain.job.wire.shared import Parcel
from hvdtrain.job.wire.sockets import NO_KEY, Line, Sockets
from hvdtrain.job.wire.wire import Wire

if TYPE_CHECKING:
    from torch.distributed import Store

# Methods whose small messages are handled by the thread that has received them: to hand them to
# another thread would cost more.
QUICK = ("push", "lease", "now", WATCH)
SMALL = 2 * INLINE_BYTES
TICK_MS = 100  # how often deadlines are checked
SOCKETS_A_MESSAGE = 16  # for so many sockets more, a poll is followed by one more message
RETRY_MS = 20  # how often a connection to a rank that comes back is tried
AGAIN_S = 5.0  # for how long a rank that comes back tries to listen where it did
REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
# A rank listens before its endpoint is known: an endpoint that refuses a connection has ended.
ENDED = zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED | REFUSED


class _Call(NamedTuple):
    """A call that is not answered yet.

    Attributes:
        future: the future of the answer.
        deadline: when the call has failed, by time.monotonic().
        timeout: the seconds until then, from the call on.
        rank: the rank that was called.
        frames: the message.
    """

    future: "Future[Any]"
    deadline: float
    timeout: float
    rank: int
    frames: Frames


class _Request(NamedTuple):
    """A peer's call.

    Attributes:
        peer: what the router calls the peer.
        number: the peer's number of the call.
        method: the name of the method.
        arguments: passed to the method.
    """

    peer: bytes
    number: int
    method: str
    arguments: list[Any]


class ZeroMQ(Wire):
    """Calls by ZeroMQ. Ranks can join while it is in use.

    Args:
        address: where this rank listens, `tcp://ADDRESS`. The system chooses the port, where none
            is named.
        requests: answers the peers.
        key: the job's key, 32 bytes in Z85, or empty.
        timeout: seconds that a handshake may take.

    Raises:
        Failure: it is no key.
        zmq.ZMQError: this host has no such address.
    """

    def __init__(
        self, address: str, requests: Requests, key: str = "", timeout: float = 60.0
    ) -> None:
        super().__init__(requests)
        self.key = key
        self._sockets = Sockets(key, timeout)
        has_port = address.count(":") == 2
        self._listener = self._sockets.listen(address if has_port else f"{address}:*")
        self.endpoint = self._listener.endpoint
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake).atexit = False
        # Messages to send, each to the rank that is called, or to the peer that is answered. None:
        # to end the connection with whoever sends what is not authentic.
        self._outgoing: deque[tuple[int | bytes, Frames | None]] = deque()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Call] = {}
        self._lost: dict[int, str] = {}  # by rank, why
        self._ends: Counter[int | bytes] = Counter()  # how many connections to a rank have ended
        self._ended = ""  # why nothing is carried any more
        self._lock = threading.Lock()  # guards the calls
        self._closing = False
        cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(min(max(4, cores), 16), thread_name_prefix="wire")
        self._thread = threading.Thread(target=self._run, daemon=True, name="wire")
        self._thread.start()

    def call(
        self, rank: int, method: str, *arguments: Any, timeout: float | None = None
    ) -> "Future[Any]":
        future: Future[Any] = Future()
        seconds = math.inf if timeout is None else timeout
        number = next(self._numbers)
        frames = pack([number, method, list(arguments)])
        call = _Call(future, time.monotonic() + seconds, seconds, rank, frames)
        with self._lock:
            lost = self._ended or self._lost.get(rank)
            if not lost:
                self._pending[number] = call
                self._post(rank, frames)
        if lost:
            future.set_exception(RuntimeError(lost))
        return future

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._pool.shutdown(wait=False)
        self._sockets.close()

    def _post(self, to: int | bytes, frames: Frames) -> None:
        """Has a message sent: with a key, the pool's threads encrypt large tensors before."""
        if not self._sockets.secret:
            self._hand_over(to, frames)
        elif _is_small(frames):
            self._hand_over(to, enclose(frames))
        else:
            with contextlib.suppress(RuntimeError):  # this process has left
                self._pool.submit(self._enclose, to, frames, self._ends[to])

    def _enclose(self, to: int | bytes, frames: Frames, ends: int) -> None:
        """Encrypts a message's tensors, and has the message sent.

        Args:
            to, frames: see _post.
            ends: how many connections had ended before. What was posted before another one ended
                was posted again since.
        """
        with self._lock:
            if self._ends[to] != ends:
                return
        enclosed: Frames | None = None  # ends the connection
        try:
            enclosed = enclose(frames)
        except Exception:  # such as a MemoryError, which nobody else would see: callers would wait
            traceback.print_exc()
        with self._lock:
            if self._ends[to] == ends:
                self._hand_over(to, enclosed)

    def _hand_over(self, to: int | bytes, frames: Frames | None) -> None:
        """Lets the thread that owns the sockets send a message: see _outgoing."""
        self._outgoing.append((to, frames))
        if threading.get_ident() != self._thread.ident:
            os.eventfd_write(self._wake, 1)

    # The methods below run in the thread that owns the sockets. The pool's threads handle some
    # messages: _take_large_request, _handle_queued, _reply, _read_answer and _settle.

    def _run(self) -> None:
        reason = "this process has left"
        try:
            self._carry()
        except BaseException as error:  # or callers would wait for a thread that has ended
            traceback.print_exc()
            reason = f"the wire failed: {type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._ended = reason
            self._give_up(lambda call: True, reason)

    def _carry(self) -> None:
        self._lines: dict[int, Line] = {}
        self._poller = zmq.Poller()
        # Called when there is something to read from a socket or file.
        self._handlers: dict[Any, Callable[[], object]] = {}
        self._handle_when_ready(self._listener.socket, self._take_requests)
        self._handle_when_ready(self._wake, partial(os.eventfd_read, self._wake))
        next_check = 0.0  # of the deadlines
        while not self._closing or self._outgoing:
            for ready, _ in self._poller.poll(TICK_MS):
                handle = self._handlers.get(ready)
                if handle:  # None where an event before this one has closed the socket
                    handle()
            while self._outgoing:
                to, frames = self._outgoing.popleft()
                self._send(to, frames)
            now = time.monotonic()
            if now > next_check:
                next_check = now + TICK_MS / 1000
                self._expire(now)
        for line in self._lines.values():
            line.socket.disable_monitor()

    def _handle_when_ready(self, source: Any, handle: Callable[[], object]) -> None:
        self._handlers[source] = handle
        self._poller.register(source, zmq.POLLIN)

    def _dial(self, rank: int) -> Line:
        """Connects to a rank."""
        dealer = self._sockets.make(zmq.DEALER)
        events = ENDED
        if rank in self.returning:
            dealer.setsockopt(zmq.RECONNECT_IVL, RETRY_MS)
            events &= ~zmq.Event.CONNECT_RETRIED
        monitor = dealer.get_monitor_socket(events)
        line = self._sockets.connect(dealer, self.endpoints[rank])
        self._lines[rank] = line
        self._handle_when_ready(dealer, partial(self._take_answer, rank, line))
        self._handle_when_ready(monitor, partial(self._take_event, rank, line, monitor))
        return line

    def _send(self, to: int | bytes, frames: Frames | None) -> None:
        """Sends a message: see _outgoing."""
        if isinstance(to, bytes):
            self._send_answer(to, frames)
        elif frames is None:
            self._lose(to, CONNECTION_ENDED)
        elif to not in self._lost:
            self._send_call(to, frames)

    def _send_answer(self, peer: bytes, frames: Frames | None) -> None:
        if frames is None:
            self._listener.hang_up(peer)
            return
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone
            self._listener.send(peer, frames)

    def _send_call(self, rank: int, frames: Frames) -> None:
        try:
            line = self._lines.get(rank) or self._dial(rank)
            line.send(frames)
        except (zmq.ZMQError, KeyError) as error:  # a rank that is gone, or one socket too many
            is_gone = isinstance(error, zmq.Again)
            self._lose(rank, CONNECTION_ENDED if is_gone else f"it cannot be called: {error}")

    def _lose(self, rank: int, why: str) -> None:
        self._hang_up(rank)
        if rank in self.returning and why == CONNECTION_ENDED:
            self._send_again(rank)
            return
        with self._lock:
            self._lost[rank] = why
        self._give_up(lambda call: call.rank == rank, why)

    def _send_again(self, rank: int) -> None:
        """Sends what a rank has not answered. It goes out when the rank is back."""
        self.returned(rank)
        self._dial(rank)
        with self._lock:
            self._ends[rank] += 1
            for _ in range(len(self._outgoing)):
                message = self._outgoing.popleft()
                if message[0] != rank:
                    self._outgoing.append(message)
            for call in self._pending.values():
                if call.rank == rank:
                    self._post(rank, call.frames)

    def _hang_up(self, rank: int) -> None:
        """Closes the connection to a rank.

        ZeroMQ would connect again otherwise, to whoever listens there then.
        """
        line = self._lines.pop(rank, None)
        if line is None:
            return
        monitor = line.socket.get_monitor_socket()
        line.socket.disable_monitor()
        for socket in (line.socket, monitor):
            self._poller.unregister(socket)
            del self._handlers[socket]
            socket.close()

    def _expire(self, now: float) -> None:
        self._give_up(lambda call: call.deadline < now)

    def _give_up(self, is_concerned: "Callable[[_Call], bool]", why: str = "") -> None:
        """Fails the calls that are concerned: for a reason, or for want of an answer."""
        with self._lock:
            calls = [(number, call) for number, call in self._pending.items() if is_concerned(call)]
        for number, call in calls:
            self._settle(number, RuntimeError(why or no_answer(call.timeout)))

    def _take_answer(self, rank: int, line: Line) -> None:
        try:
            frames = line.receive()
        except NotAuthentic as error:
            self._lose(rank, str(error))
            return
        if not frames:
            return
        if _is_small(frames):
            self._read_answer(rank, frames)
        else:
            self._pool.submit(self._read_answer, rank, frames)

    def _take_event(self, rank: int, line: Line, monitor: "zmq.Socket[bytes]") -> None:
        """Takes note that the connection to a rank has ended.

        Answers that came before that count. They are read here, so that they are not late.
        """
        frames = receive(monitor)
        if not frames:
            return
        event = int.from_bytes(frames[0].bytes[:2], "little")
        why = NO_KEY if event & REFUSED else CONNECTION_ENDED
        try:
            while (answer := line.receive()) is not None:
                if answer:
                    self._read_answer(rank, answer)
        except NotAuthentic as error:
            why = str(error)
        self._lose(rank, why)

    def _take_requests(self) -> None:
        """Handles what peers ask for.

        As a rule this reads one message: to find that there is no other takes time. The more
        sockets there are, the longer a poll takes, and the more messages are read after it.
        """
        for _ in range(1 + len(self._handlers) // SOCKETS_A_MESSAGE):
            frames = self._listener.receive()
            if frames is None:
                return
            if not frames:
                continue
            if _is_small(frames):
                self._take_small_request(frames)
            else:
                self._pool.submit(self._take_large_request, frames, time.perf_counter())

    def _take_small_request(self, frames: Frames) -> None:
        request = self._read_request(frames)
        if request is None:
            return
        if request.method in QUICK and not _has_parcels(request):
            self._handle(request)
        else:
            self._pool.submit(self._handle_queued, request, time.perf_counter())

    def _take_large_request(self, frames: list[Any], queued: float) -> None:
        """Decrypts a request and handles it; see _handle_queued."""
        waited_s = time.perf_counter() - queued
        request = self._read_request(frames)
        frames.clear()  # frees what was encrypted
        if request is not None:
            self.requests.waited(request.method, waited_s)
            self._handle(request)

    def _read_request(self, frames: Frames) -> _Request | None:
        """Returns the request in a message; None where it is none: anybody may have sent it.

        Args:
            frames: the frame of the peer, and those of its message.
        """
        peer = frames[0].bytes
        content = self._read(peer, frames[1:])
        if content is None:
            return None
        number, method, arguments = content
        if type(number) is not int or type(method) is not str or type(arguments) is not list:
            return None
        return _Request(peer, number, method, arguments)

    def _read(self, sender: int | bytes, frames: Frames) -> tuple[Any, Any, Any] | None:
        """Returns the three parts of a message; None where it is none: anybody may have sent it.

        If a message cannot be read for another reason, the connection with its sender ends. The
        sender of a request, or the caller whose answer it is, would wait otherwise.
        """
        try:
            number, second, third = unpack(disclose(frames) if self._sockets.secret else frames)
        except NotAuthentic:
            self._hand_over(sender, None)
        except (ValueError, TypeError):  # TypeError: it is no list
            pass
        except Exception:  # such as a MemoryError, which nobody else would see
            traceback.print_exc()
            self._hand_over(sender, None)
        else:
            return number, second, third
        return None

    def _handle_queued(self, request: _Request, queued: float) -> None:
        """Answers a request that has waited for a thread since then, by time.perf_counter()."""
        self.requests.waited(request.method, time.perf_counter() - queued)
        self._handle(request)

    def _handle(self, request: _Request) -> None:
        """Answers a request."""
        try:
            answer = self.requests.calls[request.method](*request.arguments)
        except Exception as error:
            answer = error
        if isinstance(answer, Future):
            answer.add_done_callback(partial(self._reply, request))
        else:
            self._reply(request, answer)

    def _reply(self, request: _Request, answer: Any) -> None:
        """Sends an answer.

        Args:
            request: the peer's call.
            answer: what the method returned or raised, or a future that is done.
        """
        number = request.number
        try:
            if isinstance(answer, Exception):
                raise answer
            value = answer.value() if isinstance(answer, Future) else answer
            frames = pack([number, "", value])
        except Exception as error:  # the method failed, or its result cannot be sent
            words = str(error)
            if not isinstance(error, Failure):  # what nobody expected is printed here too
                traceback.print_exception(error)
                words = f"{type(error).__name__}: {error}"
            frames = pack([number, words, None])
        self._post(request.peer, frames)

    def _read_answer(self, rank: int, frames: Frames) -> None:
        content = self._read(rank, frames)
        if content is None:
            return
        number, problem, value = content
        if type(number) is int:
            self._settle(number, RuntimeError(problem) if problem else value)

    def _settle(self, number: int, outcome: Any) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending and isinstance(outcome, RuntimeError):
            pending.future.set_exception(outcome)
        elif pending:
            pending.future.set_result(outcome)


def _is_small(frames: Frames) -> bool:
    """Returns whether a message has no large tensor in its frames."""
    return sum(map(len, frames)) <= SMALL


def _has_parcels(request: _Request) -> bool:
    """Returns whether a request has a tensor in shared memory, which is large."""
    for argument in request.arguments:
        if type(argument) is Push and type(argument.gradient) is list:
            if any(type(tensor) is Parcel for tensor in argument.gradient):
                return True
    return False


@while_served()
def connect(world: World, store: "Store", timeout: float, requests: Requests) -> ZeroMQ:
    """Listens, and finds where the other ranks listen.

    Args:
        world: where this rank is.
        store: the store that all ranks share.
        timeout: seconds after which a silent rank is lost.
        requests: answers the peers.

    Raises:
        Failure: the job is on several hosts, and there is no key; it is no key; the address is not
            this host's; some rank is lost, or has ended.
    """
    key = os.environ.get(WIRE_KEY, "")
    if not key and not world.is_local:
        raise Failure(
            "--wire zmq over hosts needs a key: `hvdtrain launch` makes one, or set "
            f"{WIRE_KEY} on every rank"
        )
    address = own_address(world)
    try:
        wire = ZeroMQ(f"tcp://{address}", requests, key, timeout)
    except zmq.ZMQError as error:
        raise Failure(
            f"--wire zmq cannot listen at {address} ({error}): name an interface with {VARIABLE}"
        ) from None
    if world.joined is None:
        store.set(f"wire/{world.rank}", wire.endpoint)
    # A worker that joins calls servers alone, or the first worker of a ring.
    needed = range(world.size) if world.joined is None else range(max(1, world.servers))
    others = {rank: f"wire/{rank}" for rank in needed if rank != world.rank}
    wait_for_ranks(store, others, timeout)
    # All at once: one by one, 256 ranks take 3 s.
    endpoints = store.multi_get(list(others.values())) if others else []
    for rank, endpoint in zip(others, endpoints, strict=True):
        wire.endpoints[rank] = endpoint.decode()
    return wire


def connect_again(
    endpoint: str, endpoints: Mapping[int, str], timeout: float, requests: Requests, key: str
) -> ZeroMQ:
    """Listens where a rank listened that was killed.

    Args:
        endpoint: where that was.
        endpoints: where the other ranks listen.
        timeout: seconds that a handshake may take.
        requests: answers the peers.
        key: the job's key, or empty.

    Raises:
        Failure: another process listens there now.
    """
    deadline = time.monotonic() + AGAIN_S
    while True:
        try:
            wire = ZeroMQ(endpoint, requests, key, timeout)
        except zmq.ZMQError as error:
            if time.monotonic() > deadline:
                raise Failure(
                    f"a server that comes back cannot listen at {endpoint}: {error}"
                ) from None
            time.sleep(RETRY_MS / 1000)
        else:
            wire.endpoints.update(endpoints)
            return wire
