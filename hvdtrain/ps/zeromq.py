"""The wire by ZeroMQ: fixed headers and raw tensors, nothing unpickled, and with a key encrypted and authenticated.

Each rank listens with a ROUTER socket and calls others by a DEALER socket each. ZeroMQ's sockets are for one thread:
one thread of each process owns them all, and other threads hand it what they send. A message is a header in msgpack
and a frame for each large tensor in it, which is sent from the tensor's own memory and read where it was received.

With a key, shared by the ranks of the job, everything is encrypted by CURVE (curvezmq.org, RFC 26), and who does not
have it is not let in. It is in HVDTRAIN_WIRE_KEY, which `hvdtrain launch` sets. Without one, ranks on one host go on in
clear on loopback, and ranks on several refuse.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import zmq
from torch.futures import Future
from zmq.auth.thread import ThreadAuthenticator

from hvdtrain.errors import Failure
from hvdtrain.ps.messages import Answer, Push
from hvdtrain.ps.requests import WATCH, Requests
from hvdtrain.world.network import WIRE_KEY, own_address
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store

# Bytes of a tensor up to which it travels in the header, and of a message up to which it is handled by the thread that
# has received it: another frame, and another thread, would cost more.
SMALL = 16 * 2**10
QUICK = ("push", "lease", "now", WATCH)  # methods that are handled there
TICK_MS = 100  # how often deadlines are looked at
LOST = "its connection ended"
ENDED = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL

_TENSOR, _PUSH, _ANSWER = 1, 2, 3  # msgpack's extension types
_NAMED: dict[int, Any] = {_PUSH: Push, _ANSWER: Answer}
_DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)}  # fmt: skip
_encode = msgspec.msgpack.Encoder().encode
Frames = Sequence[Any]


class ZeroMQ:
    """See ps.wire.Wire.

    Args:
        address: where this rank listens, `tcp://ADDRESS`; the system chooses the port.
        find: where a rank listens, which waits until that is known.
        requests: answers the peers.
        key: CURVE's secret key, or empty.

    Attributes:
        endpoint: where this rank listens.
    """

    def __init__(self, address: str, find: Callable[[int], str], requests: Requests, key: str = "") -> None:
        self.find, self.requests, self.key = find, requests, key
        self._context = zmq.Context()
        self._authenticator = self._let_in() if key else None
        self._router = self._socket(zmq.ROUTER)
        self._router.bind(f"{address}:*")
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outgoing: deque[tuple[int | None, Frames]] = deque()  # for a rank, or what the router sends
        self._pending: dict[int, tuple[Future[Any], float, float, int]] = {}  # call -> future, deadline, timeout, rank
        self._lost: dict[int, str] = {}  # rank -> why
        self._calls = 0
        self._lock = threading.Lock()  # guards the calls
        self._closing = False
        self._pool = ThreadPoolExecutor(min(max(4, len(os.sched_getaffinity(0))), 16), thread_name_prefix="wire")
        self._thread = threading.Thread(target=self._run, daemon=True, name="wire")
        self._thread.start()

    def call(self, rank: int, method: str, arguments: tuple[Any, ...], timeout: float) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            lost = self._lost.get(rank)
            self._calls += 1
            number = self._calls
            if not lost:
                self._pending[number] = future, time.monotonic() + timeout, timeout, rank
        if lost:
            future.set_exception(RuntimeError(lost))
        else:
            self._send(rank, pack([number, method, list(arguments)]))
        return future

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._pool.shutdown(wait=False)
        if self._authenticator:
            self._authenticator.stop()
        self._context.destroy(linger=0)
        os.close(self._wake)

    def _let_in(self) -> ThreadAuthenticator:
        """Have ZeroMQ ask who may connect: whoever has the job's key."""
        public = zmq.curve_public(self.key.encode())

        class OfThisJob:
            def callback(self, domain: str, key: bytes) -> bool:
                return key == public

        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback("*", credentials_provider=OfThisJob())
        return authenticator

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)  # what is under way is bounded above: see exchange.UNDER_WAY
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if self.key:
            secret, public = self.key.encode(), zmq.curve_public(self.key.encode())
            socket.curve_secretkey, socket.curve_publickey = secret, public
            if kind == zmq.ROUTER:
                socket.curve_server = True
            else:
                socket.curve_serverkey = public
        return socket

    def _send(self, rank: int | None, frames: Frames) -> None:
        self._outgoing.append((rank, frames))
        if threading.current_thread() is not self._thread:
            os.eventfd_write(self._wake, 1)

    # All that follows runs in the thread that owns the sockets, but for _answer and _settle, which any may run.

    def _run(self) -> None:
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._ranks: dict[Any, int] = {}  # by dealer, and by the monitor of its connection
        self._poller = zmq.Poller()
        for what in (self._router, self._wake):
            self._poller.register(what, zmq.POLLIN)
        while not self._closing or self._outgoing:
            for found, _ in self._poller.poll(TICK_MS):
                if found == self._wake:
                    os.eventfd_read(self._wake)
                elif found is self._router:
                    self._drain(self._router, self._take_request)
                elif found in self._dealers.values():
                    self._drain(found, self._take_answer)
                else:
                    self._drain(found, partial(self._take_event, self._ranks[found]))
            while self._outgoing:
                rank, frames = self._outgoing.popleft()
                socket = self._router if rank is None else self._dealer(rank)
                if socket:
                    socket.send_multipart(frames, copy=False)
            self._expire()
        for dealer in self._dealers.values():
            dealer.disable_monitor()

    def _dealer(self, rank: int) -> "zmq.Socket[bytes] | None":
        if rank not in self._dealers:
            try:
                endpoint = self.find(rank)
            except Exception as error:  # of the store's, whose process may have ended
                self._lose(rank, str(error))
                return None
            dealer = self._socket(zmq.DEALER)
            monitor = dealer.get_monitor_socket(ENDED)
            dealer.connect(endpoint)
            self._dealers[rank] = dealer
            for socket in (dealer, monitor):
                self._ranks[socket] = rank
                self._poller.register(socket, zmq.POLLIN)
        return self._dealers[rank]

    def _drain(self, socket: Any, take: Callable[[Any], None]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            take(frames)

    def _take_event(self, rank: int, frames: Any) -> None:
        event = int.from_bytes(frames[0].bytes[:2], "little")
        self._lose(rank, LOST if event == zmq.Event.DISCONNECTED else "it does not have this job's key")

    def _lose(self, rank: int, why: str) -> None:
        with self._lock:
            self._lost[rank] = why
            own = [number for number, (*_, its) in self._pending.items() if its == rank]
        for number in own:
            self._settle(number, RuntimeError(why))

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [(number, t) for number, (_, deadline, t, _) in self._pending.items() if deadline < now]
        for number, timeout in late:
            self._settle(number, RuntimeError(f"no answer within {timeout:g} s (see --timeout)"))

    def _take_answer(self, frames: Frames) -> None:
        self._here_or_there(frames, partial(self._read_answer, frames), is_quick=True)

    def _take_request(self, frames: Frames) -> None:
        """Handle what a peer asks for; what is no request is passed over, for anybody might have sent it."""
        try:
            number, method, arguments = unpack(frames[1:])
            request = int(number), str(method), list(arguments)
        except Exception:
            return
        self._here_or_there(frames, partial(self._handle, frames[0], *request), method in QUICK)

    def _here_or_there(self, frames: Frames, act: Callable[[], None], is_quick: bool) -> None:
        if is_quick and sum(len(frame) for frame in frames) <= 2 * SMALL:
            act()
        else:
            self._pool.submit(act)

    def _handle(self, peer: Any, number: int, method: str, arguments: list[Any]) -> None:
        try:
            future = self.requests.handle(method, arguments)
        except Exception as error:  # which the peer is told
            self._reply(peer, number, f"{error}" or type(error).__name__, None)
        else:
            future.add_done_callback(partial(self._answer, peer, number))

    def _answer(self, peer: Any, number: int, future: "Future[Any]") -> None:
        try:
            value = future.value()
        except Exception as error:
            self._reply(peer, number, f"{error}" or type(error).__name__, None)
        else:
            self._reply(peer, number, "", value)

    def _reply(self, peer: Any, number: int, problem: str, value: Any) -> None:
        self._send(None, [peer, *pack([number, problem, value])])

    def _read_answer(self, frames: Frames) -> None:
        number, problem, value = unpack(frames)
        self._settle(number, RuntimeError(problem) if problem else value)

    def _settle(self, number: int, outcome: Any) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending and isinstance(outcome, RuntimeError):
            pending[0].set_exception(outcome)
        elif pending:
            pending[0].set_result(outcome)


def connect(world: World, store: "Store", patience: float, requests: Requests) -> ZeroMQ:
    """Listen, and tell the others where.

    Raises:
        Failure: the job is on several hosts, and there is no key.
    """
    key = os.environ.get(WIRE_KEY, "")
    if not key and not world.is_local:
        raise Failure(
            f"--wire zmq over hosts needs a key: `hvdtrain launch` makes one, or set {WIRE_KEY} on every rank"
        )
    try:
        if key:
            zmq.curve_public(key.encode())
    except (ValueError, zmq.ZMQError):
        raise Failure(f"{WIRE_KEY} is no secret key of CURVE, which has 40 characters of Z85") from None
    wire = ZeroMQ(f"tcp://{own_address(world)}", lambda rank: store.get(f"wire/{rank}").decode(), requests, key)
    store.set(f"wire/{world.rank}", wire.endpoint)
    return wire


def pack(value: Any) -> list[Any]:
    """The header and tensors' memory of a message: numbers, text, lists, dicts, tensors, and Push and Answer."""
    tensors: list[Any] = []
    header = _encode(_prepared(value, tensors))
    return [header, *tensors]


def _prepared(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        flat, name = value.detach().contiguous().reshape(-1), str(value.dtype).removeprefix("torch.")
        memory = flat.view(torch.uint8).numpy() if value.nbytes else b""
        inside = bytes(memory) if value.nbytes <= SMALL else None  # a frame more costs more
        if inside is None:
            tensors.append(memory)
        return msgspec.msgpack.Ext(_TENSOR, _encode([name, list(value.shape), inside]))
    for code, kind in _NAMED.items():
        if isinstance(value, kind):
            return msgspec.msgpack.Ext(code, _encode([_prepared(field, tensors) for field in value]))
    if isinstance(value, list | tuple):
        return [_prepared(one, tensors) for one in value]
    if isinstance(value, dict):
        return {key: _prepared(one, tensors) for key, one in value.items()}
    return value


def unpack(frames: Frames) -> Any:
    """What was packed, with tensors in the frames' own memory; tuples come back as lists.

    Raises:
        ValueError: it is not what pack makes.
    """
    tensors = iter(frames[1:])

    def extension(code: int, data: memoryview) -> Any:
        content = decoder.decode(data)
        if code == _TENSOR:
            name, shape, inside = content
            return _tensor(name, shape, inside, tensors)
        if code not in _NAMED:
            raise ValueError(f"an extension of type {code}")
        return _NAMED[code](*content)

    decoder = msgspec.msgpack.Decoder(ext_hook=extension)
    try:
        return decoder.decode(frames[0].buffer)
    except (msgspec.DecodeError, TypeError, KeyError, StopIteration, RecursionError) as error:
        raise ValueError(str(error)) from None


def _tensor(name: str, shape: list[int], inside: bytes | None, tensors: Iterator[Any]) -> torch.Tensor:
    dtype = _DTYPES[name]
    memory = bytearray(inside) if inside is not None else next(tensors).buffer
    if len(memory) != math.prod(shape) * dtype.itemsize or any(side < 0 for side in shape):
        raise ValueError("a tensor of another size than its memory")
    return torch.frombuffer(memory, dtype=dtype).view(shape) if len(memory) else torch.empty(shape, dtype=dtype)
