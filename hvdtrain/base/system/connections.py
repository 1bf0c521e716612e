"""This process's TCP connections. Cutting them ends whatever waits for them."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Set

Address = tuple[str, int]  # a host and a port
Connection = tuple[int, str]  # a file descriptor, and the name of the socket in /proc
# How often connections are cut again while they are still being opened, in seconds.
CUT_EVERY_S = 0.1


def tcp_connections(
    excluded: Set[Address] = frozenset(), with_listening: bool = False
) -> set[Connection]:
    """Returns the open TCP sockets.

    Args:
        excluded: addresses. Connections from or to them are left out.
        with_listening: whether sockets that listen are among them.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            is_socket = target.startswith("socket:")
            if is_socket and _is_connection(int(name), excluded, with_listening):
                found.add((int(name), target))
    return found


def cut(connections: Set[Connection]) -> None:
    """Shuts down the connections that are still open; their owner closes them.

    A file descriptor that refers to another file by now is left alone.
    """
    for descriptor, target in connections:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == target:
                with socket.socket(fileno=os.dup(descriptor)) as same:
                    same.shutdown(socket.SHUT_RDWR)


def _is_connection(descriptor: int, excluded: Set[Address], with_listening: bool) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as same:
        if same.family not in (socket.AF_INET, socket.AF_INET6) or same.type != socket.SOCK_STREAM:
            return False
        if same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and not with_listening:
            return False
        ends = {same.getsockname()[:2]}
        with contextlib.suppress(OSError):  # it is not connected yet
            ends.add(same.getpeername()[:2])
        return ends.isdisjoint(excluded)


class OwnConnections:
    """The connections that are opened in a block. Any thread can cut them from then on.

    Connections that other threads open during the block count too.

    Args:
        others: returns addresses. Connections from or to them are never cut.
        ends_listening: whether sockets that listen are cut too while the block runs, so that
            nobody waits for a peer that will not come.
    """

    def __init__(
        self, others: Callable[[], Set[Address]] = frozenset, ends_listening: bool = False
    ) -> None:
        self._others = others
        self._ends_listening = ends_listening
        self._before: set[Connection] | None = None
        self._opened: set[Connection] = set()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Records the connections that the block opens."""
        self._before = tcp_connections(self._others(), self._ends_listening)
        try:
            yield
        finally:
            self._opened = tcp_connections(self._others()) - self._before
            self._before = None

    def cut(self) -> None:
        """Shuts down the connections, also while the block runs.

        In that case those that are opened later in the block are shut down soon too.
        """
        before = self._before
        if before is None:
            cut(self._opened)
            return
        self._cut_opened_since(before)
        threading.Thread(target=self._cut_until_block_ends, args=(before,), daemon=True).start()

    def _cut_opened_since(self, before: set[Connection]) -> None:
        cut(tcp_connections(self._others(), self._ends_listening) - before)

    def _cut_until_block_ends(self, before: set[Connection]) -> None:
        while self._before is before:
            self._cut_opened_since(before)
            time.sleep(CUT_EVERY_S)
