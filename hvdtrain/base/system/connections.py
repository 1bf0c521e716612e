"""This process's TCP connections. Cutting them ends whatever waits for them."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Set

Address = tuple[str, int]  # a host and a port
Connection = tuple[int, str]  # a file descriptor, and the name of the socket in /proc


def tcp_connections(excluded: Set[Address] = frozenset()) -> set[Connection]:
    """Returns the open TCP sockets, without those that listen.

    Args:
        excluded: addresses. Connections from or to them are left out.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:") and _is_connection(int(name), excluded):
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


def _is_connection(descriptor: int, excluded: Set[Address]) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as same:
        if same.family not in (socket.AF_INET, socket.AF_INET6) or same.type != socket.SOCK_STREAM:
            return False
        if same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
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
    """

    def __init__(self, others: Callable[[], Set[Address]] = frozenset) -> None:
        self._others = others
        self._before: set[Connection] | None = None
        self._opened: set[Connection] = set()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Records the connections that the block opens."""
        self._before = tcp_connections(self._others())
        try:
            yield
        finally:
            self._opened = tcp_connections(self._others()) - self._before
            self._before = None

    def cut(self) -> None:
        """Shuts down the connections, also while the block runs."""
        before = self._before
        cut(self._opened if before is None else tcp_connections(self._others()) - before)
