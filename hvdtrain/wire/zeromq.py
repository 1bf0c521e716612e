"""The wire by ZeroMQ: fixed headers and raw tensors (`packing`), with a key encrypted and authenticated (`sockets`).

Each rank listens with a ROUTER socket and calls others by a DEALER socket each. ZeroMQ's sockets are for one thread:
one thread of each process owns them all, and other threads hand it what they send. The key is in HVDTRAIN_WIRE_KEY,
which `hvdtrain launch` sets. Without one, ranks on one host go on in clear on loopback, and ranks on several refuse.
"""

import itertools
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.wire.messages import CONNECTION_ENDED, INLINE_BYTES, Push
from hvdtrain.wire.packing import Frames, pack, receive, send, unpack
from hvdtrain.wire.rendezvous import lacking
from hvdtrain.wire.requests import WATCH, Requests
from hvdtrain.wire.shared import Parcel
from hvdtrain.wire.sockets import Sockets, check_key
from hvdtrain.wire.wire import Wire
from hvdtrain.world.network import VARIABLE, WIRE_KEY, own_address
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store

# Methods that are handled by the thread that has received them, if the message is small: another would cost more.
QUICK = ("push", "lease", "now", WATCH)
SMALL = 2 * INLINE_BYTES
TICK_MS = 100  # how often deadlines are looked at
SOCKETS_A_MESSAGE = 16  # for so many more, a poll is followed by one more message
RETRY_MS = 20  # how often a rank that comes back is looked for
AGAIN_S = 5.0  # for how long a rank that comes back tries to listen where it did
REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
# An endpoint is known when its rank listens there already: one that refuses a connection has ended.
ENDED = zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED | REFUSED


class _Call(NamedTuple):
    """A call that is not answered yet."""

    future: "Future[Any]"
    deadline: float
    timeout: float
    rank: int
    frames: Frames


class ZeroMQ(Wire):
    """
    Args:
        address: where this rank listens, `tcp://ADDRESS`; the system chooses the port, where none is named.
        key: CURVE's secret key, or empty.
        patience: seconds that a handshake may take, too.

    Raises:
        zmq.ZMQError: this host has no such address.
    """

    def __init__(self, address: str, requests: Requests, key: str = "", patience: float = 60.0) -> None:
        super().__init__(requests, patience)
        self.key = key
        self._sockets = Sockets(key, patience)
        self._router = self._sockets.make(zmq.ROUTER)
        self._router.bind(address if address.count(":") == 2 else f"{address}:*")
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._outgoing: deque[tuple[int | None, Frames]] = deque()  # for a rank, or what the router sends
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Call] = {}
        self._lost: dict[int | None, str] = {}  # rank -> why
        self._ended = ""  # why nothing is carried any more
        self._lock = threading.Lock()  # guards the calls
        self._closing = False
        self._pool = ThreadPoolExecutor(min(max(4, len(os.sched_getaffinity(0))), 16), thread_name_prefix="wire")
        self._thread = threading.Thread(target=self._run, daemon=True, name="wire")
        self._thread.start()

    def call(self, rank: int, method: str, *arguments: Any, timeout: float | None = None) -> "Future[Any]":
        future: Future[Any] = Future()
        seconds = self.patience if timeout is None else timeout
        number = next(self._numbers)
        frames = pack([number, method, list(arguments)])
        with self._lock:
            lost = self._ended or self._lost.get(rank)
            if not lost:
                self._pending[number] = _Call(future, time.monotonic() + seconds, seconds, rank, frames)
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

    def _post(self, rank: int | None, frames: Frames) -> None:
        """Have the thread that owns the sockets send it."""
        self._outgoing.append((rank, frames))
        if threading.get_ident() != self._thread.ident:
            os.eventfd_write(self._wake, 1)

    # What follows runs in the thread that owns the sockets, but for what handles a message, which may have another.

    def _run(self) -> None:
        reason = "this process has left"
        try:
            self._carry()
        except BaseException as error:  # nobody may wait for a thread that has ended
            traceback.print_exc()
            reason = f"the wire failed: {type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._ended = reason
            self._give_up(lambda call: True, reason)

    def _carry(self) -> None:
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], object]] = {}  # what to do when there is something to read
        self._handle_when_ready(self._router, self._take_requests)
        self._handle_when_ready(self._wake, partial(os.eventfd_read, self._wake))
        look_at = 0.0  # when deadlines are looked at next
        while not self._closing or self._outgoing:
            for ready, _ in self._poller.poll(TICK_MS):
                if handle := self._handlers.get(ready):  # it is not lost by what was found before it
                    handle()
            while self._outgoing:
                self._send(*self._outgoing.popleft())
            if (now := time.monotonic()) > look_at:
                look_at = now + TICK_MS / 1000
                self._expire(now)
        for dealer in self._dealers.values():
            dealer.disable_monitor()

    def _handle_when_ready(self, what: Any, handle: Callable[[], object]) -> None:
        self._handlers[what] = handle
        self._poller.register(what, zmq.POLLIN)

    def _dial(self, rank: int) -> "zmq.Socket[bytes]":
        dealer = self._sockets.make(zmq.DEALER)
        events = ENDED
        if rank in self.returning:
            dealer.setsockopt(zmq.RECONNECT_IVL, RETRY_MS)
            events &= ~zmq.Event.CONNECT_RETRIED
        monitor = dealer.get_monitor_socket(events)
        dealer.connect(self.endpoints[rank])
        self._dealers[rank] = dealer
        self._handle_when_ready(dealer, partial(self._take_answer, dealer))
        self._handle_when_ready(monitor, partial(self._take_event, rank, monitor))
        return dealer

    def _send(self, rank: int | None, frames: Frames) -> None:
        if rank in self._lost:
            return
        try:
            send(self._router if rank is None else self._dealers.get(rank) or self._dial(rank), frames)
        except (zmq.ZMQError, KeyError) as error:  # a peer that is gone, or one socket too many
            if rank is not None:
                self._lose(rank, CONNECTION_ENDED if isinstance(error, zmq.Again) else str(error))

    def _lose(self, rank: int, why: str) -> None:
        self._hang_up(rank)
        if rank in self.returning and why == CONNECTION_ENDED:
            self._send_again(rank)
            return
        with self._lock:
            self._lost[rank] = why
        self._give_up(lambda call: call.rank == rank, why)

    def _send_again(self, rank: int) -> None:
        """Whatever the rank has not answered: it is there, and goes out when the rank is back."""
        self.returned(rank)
        with self._lock:
            for _ in range(len(self._outgoing)):
                if (entry := self._outgoing.popleft())[0] != rank:
                    self._outgoing.append(entry)
            unanswered = [call.frames for call in self._pending.values() if call.rank == rank]
        dealer = self._dial(rank)
        for frames in unanswered:
            send(dealer, frames)

    def _hang_up(self, rank: int) -> None:
        if dealer := self._dealers.pop(rank, None):  # which would try to connect again, to whoever listens there then
            monitor = dealer.get_monitor_socket()
            dealer.disable_monitor()
            for socket in (dealer, monitor):
                self._poller.unregister(socket)
                del self._handlers[socket]
                socket.close()

    def _expire(self, now: float) -> None:
        self._give_up(lambda call: call.deadline < now)

    def _give_up(self, concerned: "Callable[[_Call], bool]", why: str = "") -> None:
        with self._lock:
            given_up = [(number, call.timeout) for number, call in self._pending.items() if concerned(call)]
        for number, timeout in given_up:
            self._settle(number, RuntimeError(why or f"no answer within {timeout:g} s (see --timeout)"))

    def _take_answer(self, dealer: "zmq.Socket[bytes]") -> None:
        frames = receive(dealer)
        if sum(map(len, frames)) <= SMALL:
            self._read_answer(frames)
        else:
            self._pool.submit(self._read_answer, frames)

    def _take_event(self, rank: int, monitor: "zmq.Socket[bytes]") -> None:
        """The connection to the rank has ended. What came before that counts, and is read here: it must not be late."""
        if not (frames := receive(monitor)):
            return
        while answer := receive(self._dealers[rank]):
            self._read_answer(answer)
        event = int.from_bytes(frames[0].bytes[:2], "little")
        self._lose(rank, "it does not have this job's key" if event & REFUSED else CONNECTION_ENDED)

    def _take_requests(self) -> None:
        """Handle what peers ask for; what is no request is passed over, for anybody might have sent it.

        As a rule one: to find that there is no other takes time. The more sockets, the longer a poll takes.
        """
        for _ in range(1 + len(self._handlers) // SOCKETS_A_MESSAGE):
            if not (frames := receive(self._router)):
                return
            try:
                number, method, arguments = unpack(frames[1:])
            except (ValueError, TypeError):  # or it is no list
                continue
            if type(number) is int and type(method) is str and type(arguments) is list:
                # A large tensor is in frames of its own, or lies elsewhere.
                is_small = sum(map(len, frames)) <= SMALL and not any(
                    type(part) is Parcel
                    for one in arguments
                    if type(one) is Push and type(one.gradient) is list
                    for part in one.gradient
                )
                if method in QUICK and is_small:
                    self._handle(frames[0].bytes, number, method, arguments)
                else:
                    self._pool.submit(self._handle, frames[0].bytes, number, method, arguments, time.perf_counter())

    def _handle(self, peer: Any, number: int, method: str, arguments: list[Any], queued: float | None = None) -> None:
        """Answer a request, which waits for a thread since it was `queued`."""
        if queued is not None:
            self.requests.waited(method, time.perf_counter() - queued)
        try:
            answer = self.requests.calls[method](*arguments)
        except Exception as error:
            answer = error
        if isinstance(answer, Future):
            answer.add_done_callback(partial(self._reply, peer, number))
        else:
            self._reply(peer, number, answer)

    def _reply(self, peer: Any, number: int, answer: Any) -> None:
        """
        Args:
            answer: what a method returned or raised, or a future that is done.
        """
        try:
            if isinstance(answer, Exception):
                raise answer
            frames = pack([number, "", answer.value() if isinstance(answer, Future) else answer])
        except Exception as error:  # it went wrong, or cannot be sent
            words = str(error)
            if not isinstance(error, Failure):  # what nobody expected is printed here too
                traceback.print_exception(error)
                words = f"{type(error).__name__}: {error}"
            frames = pack([number, words, None])
        self._post(None, [peer, *frames])

    def _read_answer(self, frames: Frames) -> None:
        try:
            number, problem, value = unpack(frames)
        except (ValueError, TypeError):
            return
        if type(number) is int:
            self._settle(number, RuntimeError(problem) if problem else value)

    def _settle(self, number: int, outcome: Any) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending and isinstance(outcome, RuntimeError):
            pending.future.set_exception(outcome)
        elif pending:
            pending.future.set_result(outcome)


def connect(world: World, store: "Store", patience: float, requests: Requests) -> ZeroMQ:
    """Listen, and know where the others do.

    Args:
        patience: seconds that this may take.

    Raises:
        Failure: the job is on several hosts, and there is no key; the address is not this host's; some rank did not
            come in time.
    """
    key = os.environ.get(WIRE_KEY, "")
    if not key and not world.is_local:
        raise Failure(
            f"--wire zmq over hosts needs a key: `hvdtrain launch` makes one, or set {WIRE_KEY} on every rank"
        )
    check_key(key)
    address = own_address(world)
    try:
        wire = ZeroMQ(f"tcp://{address}", requests, key, patience)
    except zmq.ZMQError as error:
        raise Failure(f"--wire zmq cannot listen at {address} ({error}): name an interface with {VARIABLE}") from None
    if world.joined is None:
        store.set(f"wire/{world.rank}", wire.endpoint)
    # Who joins calls servers alone, or the first worker of a ring.
    needed = range(world.size if world.joined is None else max(1, world.servers))
    others = {rank: f"wire/{rank}" for rank in needed if rank != world.rank}
    if missing := lacking(store, others, patience):
        raise Failure(f"ranks {missing} did not come within {patience:g} s (see --timeout)")
    endpoints = store.multi_get(list(others.values())) if others else []  # one by one, 256 ranks take 3 s
    wire.endpoints.update({rank: endpoint.decode() for rank, endpoint in zip(others, endpoints, strict=True)})
    return wire


def connect_again(endpoint: str, endpoints: Mapping[int, str], patience: float, requests: Requests, key: str) -> ZeroMQ:
    """Listen where a rank listened that was killed, and know where the others do.

    Raises:
        Failure: another process listens there now.
    """
    deadline = time.monotonic() + AGAIN_S
    while True:
        try:
            wire = ZeroMQ(endpoint, requests, key, patience)
        except zmq.ZMQError as error:
            if time.monotonic() > deadline:
                raise Failure(f"a server that comes back cannot listen at {endpoint}: {error}") from None
            time.sleep(RETRY_MS / 1000)
        else:
            wire.endpoints.update(endpoints)
            return wire
