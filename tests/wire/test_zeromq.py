"""The wire by ZeroMQ: calls between two ends in this process, and what strangers get."""

import contextlib
import os
import socket
import threading
import time
from queue import Queue

import msgspec
import pytest
import torch
import zmq
from helpers.jobs import until
from hypothesis import given
from hypothesis import strategies as st
from torch.futures import Future
from zmq.auth.thread import ThreadAuthenticator

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.network import new_wire_key
from hvdtrain.job.ps.server_metrics import ServerLoad
from hvdtrain.job.wire import packing, sockets, zeromq
from hvdtrain.job.wire.messages import CONNECTION_ENDED, FreshWeights, Push
from hvdtrain.job.wire.noise import Opening
from hvdtrain.job.wire.packing import _DTYPES, pack, unpack
from hvdtrain.job.wire.requests import STAYS, WATCH, Calls, Requests, as_future
from hvdtrain.job.wire.sockets import SecretLine
from hvdtrain.job.wire.zeromq import ZeroMQ, connect_again

HERE = "tcp://127.0.0.1"
encode = msgspec.msgpack.encode


class Endpoint:
    """What the tests call."""

    def __init__(self):
        self.later = Future()
        self.pushed = []
        self.calls = Calls(
            {name: getattr(self, name) for name in ("push", "twice", "wait", "fail", "give")}
        )
        self.load = ServerLoad()
        self.waited = self.load.waited

    def push(self, bucket, push):
        self.pushed.append((bucket, push))
        return FreshWeights(push.step, 0, push.gradient * 2)

    def twice(self, value):
        return [value, value]

    def wait(self):
        return self.later

    def fail(self):
        raise ValueError("what a method raises")

    def give(self):
        return object()

    def hidden(self):
        return "secret"


class Ends:
    """A server and workers that know where it listens."""

    def __init__(self):
        self.wires = []

    def server(self, key=""):
        self.endpoint = Endpoint()
        self.wires.append(ZeroMQ(HERE, Requests(self.endpoint), key))
        return self.wires[-1]

    def worker(self, server, key=""):
        self.wires.append(ZeroMQ(HERE, Requests(), key))
        self.wires[-1].endpoints[0] = server.endpoint
        return self.wires[-1]


@pytest.fixture
def ends():
    made = Ends()
    yield made
    for wire in made.wires:
        if not wire._closing:
            wire.close()


@pytest.fixture(params=["clear", "encrypted"])
def key(request):
    return zmq.curve_keypair()[1].decode() if request.param == "encrypted" else ""


def call(wire, method, *arguments, timeout=20.0):
    return wire.call(0, method, *arguments, timeout=timeout).wait()


def test_calls_are_answered_with_tensors_of_any_size_untouched(ends, key):
    worker = ends.worker(ends.server(key), key)
    for size in (1, 1000, 5_000_000):
        gradient = torch.randn(size)
        answer = call(worker, "push", 3, Push(1, 7, 6, 0.1, gradient))
        assert isinstance(answer, FreshWeights) and answer.version == 7
        assert answer.weights.equal(gradient * 2)
        [(bucket, push)] = ends.endpoint.pushed
        ends.endpoint.pushed.clear()
        assert bucket == 3 and push[:4] == (1, 7, 6, 0.1)
        push.gradient.add_(1)  # its own to overwrite
    assert call(worker, "twice", {"a": [1, None, 2.5, "x"]}) == [{"a": [1, None, 2.5, "x"]}] * 2


def test_a_push_that_waits_for_a_thread_is_counted(ends):
    """A small one is handled by the thread that has read it."""
    worker = ends.worker(server := ends.server())
    call(worker, "push", 0, Push(1, 1, 0, 0.1, torch.ones(9)))
    assert ends.endpoint.load.row()["queued_s"] == 0
    blocked = threading.Event()
    for _ in range(server._pool._max_workers):
        server._pool.submit(blocked.wait)
    late = worker.call(0, "push", 0, Push(1, 2, 0, 0.1, torch.ones(100_000)), timeout=20.0)
    time.sleep(0.3)
    assert not late.done()
    blocked.set()
    late.wait()
    assert 0.05 < ends.endpoint.load.row()["queued_s"] < 10


def test_many_threads_may_call_at_once(ends, key):
    worker = ends.worker(ends.server(key), key)
    wrong = []

    def many(own):
        for number in range(50):
            sent = torch.full((own * 997 + number + 1,), float(number))
            if not call(worker, "push", 0, Push(own, number, 0, 0.1, sent)).weights.equal(sent * 2):
                wrong.append((own, number))

    threads = [threading.Thread(target=many, args=(own,)) for own in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(ends.endpoint.pushed) == 300


def test_an_answer_may_come_later_and_what_is_raised_is_told(ends):
    worker = ends.worker(ends.server())
    late = worker.call(0, "wait", timeout=20.0)
    assert call(worker, "twice", 1) == [1, 1] and not late.done()
    ends.endpoint.later.set_result(torch.ones(2))
    assert late.wait().equal(torch.ones(2))
    refused = {
        "fail": "ValueError: what a method raises",
        "nosuch": "nosuch",
        "hidden": "not for peers",
    }
    for method, said in (refused | {"give": "TypeError"}).items():
        with pytest.raises(RuntimeError, match=said):
            call(worker, method)
    began = time.monotonic()
    ends.endpoint.later = Future()
    with pytest.raises(RuntimeError, match=r"no answer within 0\.3 s"):
        call(worker, "wait", timeout=0.3)
    assert time.monotonic() - began < 5


def test_who_is_lost_is_known_at_once(ends):
    server = ends.server()
    worker = ends.worker(server)
    late = worker.call(0, "wait", timeout=60.0)
    assert call(worker, "twice", 1) == [1, 1]
    server.close()
    for waiting in (
        late.wait,
        lambda: call(worker, "twice", 1),
        lambda: call(ends.worker(server), "twice", 1),
    ):
        # the last one never had any
        with pytest.raises(RuntimeError, match="its connection ended"):
            waiting()


def test_what_a_rank_has_not_answered_is_sent_again_when_it_is_back(ends, key):
    server = ends.server(key)
    worker, gone = ends.worker(server, key), []
    worker.returning, worker.returned = frozenset({0}), gone.append
    assert call(worker, "twice", 1) == [1, 1]
    before = worker.call(0, "wait", timeout=20.0)
    assert call(worker, "push", 3, Push(1, 7, 6, 0.1, torch.ones(9_000))).version == 7
    server.close()
    until(lambda: gone == [0])
    meanwhile = worker.call(0, "twice", {"a": torch.ones(9_000)}, timeout=20.0)
    late = worker.call(0, "wait", timeout=0.3)
    with pytest.raises(RuntimeError, match=r"no answer within 0\.3 s"):
        late.wait()
    endpoint = Endpoint()
    endpoint.later.set_result("at last")
    again = connect_again(server.endpoint, {5: "tcp://there"}, 20.0, Requests(endpoint), key)
    ends.wires.append(again)
    assert before.wait() == "at last" and meanwhile.wait()[1]["a"].equal(torch.ones(9_000))
    assert endpoint.pushed == [] and again.endpoints == {5: "tcp://there"}
    assert call(worker, "twice", 2) == [2, 2]


@pytest.mark.parametrize("has", ["another key", "no key"])
def test_who_has_not_the_key_gets_nothing(ends, has):
    server = ends.server(new_wire_key())
    stranger = ends.worker(server, new_wire_key() if has == "another key" else "")
    with pytest.raises(RuntimeError, match=r"no answer within|key|its connection ended"):
        call(stranger, "twice", 1, timeout=1.0)
    assert call(ends.worker(server, server.key), "twice", 1) == [1, 1]


def stranger_at(context, server, password):
    """A socket that is not hvdtrain's, of somebody who has recorded the password."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.plain_username, dealer.plain_password = b"hvdtrain", password.encode()
    dealer.connect(server.endpoint)
    return dealer


def test_who_has_recorded_the_password_alone_is_not_let_in(ends):
    server = ends.server(new_wire_key())
    worker = ends.worker(server, server.key)
    greeting = Opening(server._sockets.secret, server.endpoint.encode()).greeting
    with zmq.Context() as context:
        stranger = stranger_at(context, server, server._sockets._password)
        for frames in (pack([1, "twice", [1]]), [b""], [os.urandom(48)], [b"", b""]):
            stranger.send_multipart(frames)
            assert call(worker, "twice", 1) == [1, 1]
        assert not stranger.poll(500)
        # A greeting that was recorded is replied to, and what follows is not understood.
        stranger.send(greeting)
        assert len(stranger.recv()) == len(greeting)
        stranger.send(os.urandom(100))
        assert stranger.recv() == b""
        stranger.close()
    assert call(worker, "twice", 1) == [1, 1]


def test_a_server_without_the_key_gets_nothing(ends):
    """Though it lets everybody connect who wants to."""
    key = new_wire_key()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_plain("*", {"hvdtrain": sockets._password(sockets.secret_of(key))})
        impostor.linger, impostor.plain_server = 0, True
        impostor.bind(HERE + ":*")
        worker = ZeroMQ(HERE, Requests(), key)
        ends.wires.append(worker)
        worker.endpoints[0] = impostor.getsockopt_string(zmq.LAST_ENDPOINT)
        late = worker.call(0, "twice", "secret", timeout=20.0)
        peer, greeting = impostor.recv_multipart()
        assert b"secret" not in greeting
        impostor.send_multipart([peer, greeting])
        with pytest.raises(RuntimeError, match="it does not have this job's key"):
            late.wait()
        authenticator.stop()


def test_what_strangers_begin_is_forgotten_and_those_who_belong_here_stay(ends, monkeypatch):
    monkeypatch.setattr(sockets, "MOST_GREETED", 3)
    monkeypatch.setattr(sockets, "MOST_CHANNELS", 4)
    server = ends.server(new_wire_key())
    worker = ends.worker(server, server.key)
    assert call(worker, "twice", 1) == [1, 1]
    with zmq.Context() as context:
        for _ in range(9):
            stranger = stranger_at(context, server, server._sockets._password)
            place = server.endpoint.encode()
            stranger.send(Opening(server._sockets.secret, place).greeting)
            assert stranger.poll(5000)
            stranger.close()
            other = ends.worker(server, server.key)
            for each in (worker, other):
                assert call(each, "twice", 1) == [1, 1]
            other.close()
    assert len(server._listener._greeted) <= 3 and len(server._listener._channels) == 4


class Between:
    """Somebody between a worker and a server, who has recorded what the worker has sent, and can
    change it and what the server answers.

    Args:
        endpoint: where the server listens.

    Attributes:
        endpoint: where the worker is to connect.
        sent: all bytes from the worker.
        change: called with "call" or "answer" and bytes on their way; returns what goes on.
    """

    def __init__(self, endpoint):
        self.port = int(endpoint.rpartition(":")[2])
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"{HERE}:{self.listener.getsockname()[1]}"
        self.sent = b""
        self.change = lambda way, data: data
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                worker, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.port))
                for way in (("call", worker, server), ("answer", server, worker)):
                    threading.Thread(target=self.carry, args=way, daemon=True).start()

    def carry(self, way, source, target):
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(2**16):
                if way == "call":
                    self.sent += data
                target.sendall(self.change(way, data))
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def between(ends, monkeypatch):
    """Somebody between; a server, and a worker that takes them for the server."""
    server = ends.server(new_wire_key())
    somebody = Between(server.endpoint)

    def connect(self, dealer, endpoint):
        dealer.connect(somebody.endpoint)
        return SecretLine(dealer, self.secret, endpoint)

    monkeypatch.setattr(sockets.Sockets, "connect", connect)
    yield somebody, server, ends.worker(server, server.key)
    somebody.listener.close()


def test_nothing_is_readable_on_the_way_and_nothing_can_be_said_twice(between, ends):
    somebody, _, worker = between
    gradient = torch.full((20_000,), 1.5)
    for number in (1, 2):
        assert call(worker, "push", 3, Push(1, number, 6, 0.1, gradient)).version == number
    assert b"push" not in somebody.sent and bytes(gradient[:4].numpy()) not in somebody.sent
    with socket.create_connection(("127.0.0.1", somebody.port)) as again:
        again.sendall(somebody.sent)
        time.sleep(0.5)
    assert call(worker, "twice", 1) == [1, 1] and len(ends.endpoint.pushed) == 2


@pytest.mark.parametrize("way", ["call", "answer"])
@pytest.mark.parametrize("size", [1, 20_000])
def test_what_is_changed_on_the_way_ends_the_connection(way, size, between):
    """Whether that is a header or a tensor. The rank is called again where it comes back."""
    somebody, _, worker = between
    worker.returning = frozenset({0})
    assert call(worker, "twice", torch.ones(size))[0].equal(torch.ones(size))
    changed = []

    def change(passing, data):
        if passing != way or changed:
            return data
        changed.append(len(data))
        return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]

    somebody.change = change
    push = Push(1, 1, 0, 0.1, torch.ones(size))
    ends_before = worker._ends[0]
    assert call(worker, "push", 3, push).weights.equal(torch.full((size,), 2.0))
    assert changed and worker._ends[0] == ends_before + 1
    worker.returning = frozenset()
    changed.clear()
    with pytest.raises(RuntimeError, match="its connection ended"):
        call(worker, "push", 3, push._replace(step=2))


@pytest.mark.parametrize("way", ["enclose", "disclose"])
def test_where_memory_runs_out_the_connection_ends_and_nobody_waits(way, ends, monkeypatch):
    key = new_wire_key()
    worker = ends.worker(ends.server(key), key)
    assert call(worker, "twice", 1) == [1, 1]
    does = getattr(zeromq, way)

    def without_memory(frames):
        if sum(map(len, frames)) > zeromq.SMALL:
            raise MemoryError
        return does(frames)

    monkeypatch.setattr(zeromq, way, without_memory)
    with pytest.raises(RuntimeError, match=CONNECTION_ENDED):
        call(worker, "push", 3, Push(1, 7, 6, 0.1, torch.randn(100_000)), timeout=None)


def test_a_connection_that_is_led_to_another_rank_is_not_answered(ends):
    server = ends.server(new_wire_key())
    other = Between(server.endpoint)
    worker = ends.worker(server, server.key)
    worker.endpoints[0] = other.endpoint
    with pytest.raises(RuntimeError, match=r"no answer within"):
        call(worker, "twice", 1, timeout=1.0)
    other.listener.close()


@pytest.mark.parametrize("key", ["short", "é" * 40, " " * 40, "#" * 40, "0" * 45])
def test_what_is_no_key_is_told(key):
    with pytest.raises(Failure, match="HVDTRAIN_WIRE_KEY is no key"):
        ZeroMQ(HERE, Requests(), key)


def test_garbage_half_messages_and_silence_do_not_stall_anybody(ends, key):
    server = ends.server(key)
    worker = ends.worker(server, key)
    port = int(server.endpoint.rpartition(":")[2])
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff\0\0\0\0\0\0\0\1\x7f\3\0"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(sent)
            assert call(worker, "twice", 1) == [1, 1]
    if key:
        return
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:  # it speaks ZeroMQ
        stranger.linger = 0
        stranger.connect(server.endpoint)
        bomb = msgspec.msgpack.Ext(1, encode(["uint8", [10**12], 10**12]))
        for message in (
            5,
            None,
            1.5,
            {"a": 1},
            [1, "twice"],
            ["9" * 30, "lease", []],
            [10**18, 5, []],
            [1, "lease", {}],
            [1, "twice", [bomb]],
        ):
            stranger.send(encode(message))
        for frames in ([b""], [os.urandom(50)], [b"\xc1"], [b"", b"", b""]):
            stranger.send_multipart(frames)
        assert call(worker, "twice", 1) == [1, 1]


TENSORS = st.builds(
    lambda dtype, shape: torch.randint(0, 2, shape).to(dtype),
    st.sampled_from(list(_DTYPES.values())),
    st.lists(st.integers(0, 4), max_size=3),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | TENSORS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def frames_of(value):
    return [zmq.Frame(bytes(memoryview(frame))) for frame in pack(value)]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def test_a_tensor_that_is_larger_than_a_frame_may_be_travels_in_pieces(ends, monkeypatch):
    """As the optimizer's state does to a worker that joins a ring."""
    monkeypatch.setattr(sockets, "LARGEST", 2**17)
    monkeypatch.setattr(packing, "PIECE", 2**15, raising=False)
    worker = ends.worker(ends.server())
    state = {
        "weights": torch.randn(3, 70_001),
        "exact": torch.arange(2**13, dtype=torch.float32),
        "step": 7,
    }
    for came in call(worker, "twice", state):
        assert (
            came["step"] == 7
            and came["weights"].equal(state["weights"])
            and came["exact"].equal(state["exact"])
        )
    header, *frames = pack([1, "", state])
    assert max(map(len, frames)) == 2**15
    for broken in (frames[:-1], [], [frames[0][:-1], *frames[1:]], [frames[0][:0], *frames[1:]]):
        with pytest.raises(ValueError, match="another size"):
            unpack([zmq.Frame(bytes(frame)) for frame in (header, *broken)])


@given(VALUES)
def test_what_is_packed_comes_back(value):
    assert same(value, unpack(frames_of(value)))


@given(VALUES, st.data())
def test_a_message_that_was_changed_is_read_or_refused(value, data):
    header, *tensors = frames_of(value)
    content = bytearray(header.bytes)
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    kept = data.draw(st.integers(0, len(tensors)))
    try:
        unpack([zmq.Frame(bytes(content)), *tensors[:kept]])
    except ValueError:
        pass


def test_who_is_waited_for_can_say_that_it_does_not_come_back(ends):
    server = ends.server()
    worker = ends.worker(server)
    worker.returning = frozenset({0})
    watch, late = worker.call(0, WATCH, timeout=20.0), worker.call(0, "wait", timeout=20.0)
    assert call(worker, "twice", 1) == [1, 1]
    server.requests.leave(Failure("all workers are lost"))
    with pytest.raises(RuntimeError, match="all workers are lost"):
        watch.wait()
    worker.returning -= {0}
    server.close()
    with pytest.raises(RuntimeError, match="its connection ended"):
        late.wait()


def test_one_call_without_an_answer_is_not_silence_but_two_are(ends):
    """As where a job was suspended as a whole for longer than the timeout."""
    worker, ended = ends.worker(server := ends.server()), Queue()
    answers = [Future(), as_future(STAYS), Future(), Future()]
    server.requests.calls[WATCH] = lambda: answers.pop(0)
    worker.watch(0, 2.0, ended.put)  # who answers does so within half of that
    assert ended.get(timeout=20) == "no answer within 2 s (see --timeout)" == worker.lost[0]
    assert not answers


def test_answers_that_came_before_the_connection_ended_count(ends):
    """Though this end was late: its process was stopped, or the host is busy."""
    server = ends.server()
    worker = ends.worker(server)
    assert call(worker, "twice", 1) == [1, 1]
    waiting = [worker.call(0, "wait", timeout=6) for _ in range(3)]
    held, goes_on = threading.Event(), threading.Event()
    worker._expire = lambda now: (held.set(), goes_on.wait(60))
    assert held.wait(20)
    ends.endpoint.later.set_result("done")
    assert worker._lines[0].socket.poll(
        20_000
    )  # its own thread is held; what is not sent yet is lost
    time.sleep(0.2)
    server.close()
    time.sleep(0.2)
    goes_on.set()
    assert [future.wait() for future in waiting] == ["done"] * 3
