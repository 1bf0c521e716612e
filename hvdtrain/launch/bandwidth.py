"""Measures the network between hosts before a job starts: bandwidth each way and round trip, in a few seconds.

On each host `probe.py` serves and asks; `preflight` tells them whom. In a round every host sends to one other and
receives from one, all at once, as in a ring; with up to five hosts every pair has its turn in both directions.
"""

import socket
import struct
import time
from collections.abc import Sequence
from statistics import median
from threading import Thread
from typing import Any

ROUNDS = 4  # at most
SECONDS = 0.5  # of sending, in a round
WARM_UP_S = 0.15  # of these: a connection that begins is slow, and a limited link may have saved up a burst
ROUND_TRIPS, WARM_UP_TRIPS = 21, 4
BACKLOG = 1024  # connections that the kernel completes by itself
CHUNK = bytes(2**18)
PATIENCE_S = 5.0  # for whoever does not answer
_ECHO, _COUNT = b"e", b"c"
_RATE = struct.Struct("!d")

Address = tuple[str, int]


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Who sends to whom in each round. Beyond five hosts not all pairs have a turn: the rounds are spread over them."""
    n = len(hosts)
    count = min(ROUNDS, n - 1)
    shifts = [1 + i * (n - 1) // count for i in range(count)]
    return [[(hosts[i], hosts[(i + shift) % n]) for i in range(n)] for shift in shifts]


def serve(address: str) -> int:
    """Answer measurements on this address, in threads of this process; return the port."""
    listener = socket.create_server((address, 0), backlog=BACKLOG)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            Thread(target=_answer, args=(connection,), daemon=True).start()

    Thread(target=accept, daemon=True, name="measuring the network").start()
    return listener.getsockname()[1]


def _answer(connection: socket.socket) -> None:
    try:
        with connection:
            connection.settimeout(PATIENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if connection.recv(1) == _ECHO:
                while word := connection.recv(1):
                    connection.sendall(word)
            else:
                connection.sendall(_RATE.pack(_received_bytes_per_s(connection)))
    except OSError:  # the other one finds it too
        pass


def _received_bytes_per_s(connection: socket.socket) -> float:
    """Of what comes until the sender has ended, after a warm-up."""
    buffer = bytearray(len(CHUNK))
    began = warm = now = time.perf_counter()
    total = 0
    while received := connection.recv_into(buffer):
        now = time.perf_counter()
        if now - began < WARM_UP_S:
            warm = now
        else:
            total += received
    return total / (now - warm) if now > warm else 0.0


def round_trip_us(to: Address) -> float:
    """The median time, in microseconds, until a byte comes back over a TCP connection."""
    times = []
    with _connect(to, _ECHO) as connection:
        for _ in range(WARM_UP_TRIPS + ROUND_TRIPS):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - began)
    return round(1e6 * median(times[WARM_UP_TRIPS:]), 1)


def gbit_s(to: Address) -> float:
    """10^9 bits a second that arrive over one TCP connection."""
    with _connect(to, _COUNT) as connection:
        until = time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            connection.sendall(CHUNK)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(PATIENCE_S)
        rate: float = _RATE.unpack(connection.recv(_RATE.size, socket.MSG_WAITALL))[0]
    return round(8e-9 * rate, 4)


def _connect(to: Address, what: bytes) -> socket.socket:
    connection = socket.create_connection(to, timeout=PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(what)
    return connection


def asked(request: dict[str, Any]) -> dict[str, Any]:
    """What a probe answers to `{"round_trip": [address, port]}` or `{"send": …}`; null where it failed."""
    measure = {"round_trip": round_trip_us, "send": gbit_s}
    [(what, (host, port))] = request.items()
    try:
        return {"measured": measure[what]((host, port))}
    except (OSError, struct.error):
        return {"measured": None}
