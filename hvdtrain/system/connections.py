"""This process's TCP connections, and cutting some of them, which ends whatever waits for them."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Set

Address = tuple[str, int]  # a host's and a port


def tcp_connections(passed_over: Set[Address] = frozenset()) -> set[tuple[int, str]]:
    """The TCP sockets that are open now, but for those that listen or have an end at one of these addresses: the file
    descriptor, and what it refers to.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:") and _is_tcp_elsewhere(int(name), passed_over):
                found.add((int(name), target))
    return found


def cut(connections: Set[tuple[int, str]]) -> None:
    """Shut down those that are still open. Their owner closes them; a number that is another's by now is left alone."""
    for descriptor, target in connections:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == target:
                with socket.socket(fileno=os.dup(descriptor)) as same:
                    same.shutdown(socket.SHUT_RDWR)


def _is_tcp_elsewhere(descriptor: int, passed_over: Set[Address]) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as same:
        if same.family not in (socket.AF_INET, socket.AF_INET6) or same.type != socket.SOCK_STREAM:
            return False
        ends = {same.getsockname()[:2]}
        with contextlib.suppress(OSError):  # it is not connected yet
            ends.add(same.getpeername()[:2])
        return not same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and ends.isdisjoint(passed_over)


class OwnConnections:
    """Those that are opened in a block, to be cut at any time from then on, by any thread. What other threads connect
    to meanwhile counts as opened there.

    Args:
        others: addresses whose connections are never cut.
    """

    def __init__(self, others: Callable[[], Set[Address]] = frozenset) -> None:
        self._others = others
        self._before: set[tuple[int, str]] | None = None
        self._opened: set[tuple[int, str]] = set()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        self._before = tcp_connections(self._others())
        try:
            yield
        finally:
            self._opened, self._before = tcp_connections(self._others()) - self._before, None

    def cut(self) -> None:
        before = self._before
        cut(self._opened if before is None else tcp_connections(self._others()) - before)
