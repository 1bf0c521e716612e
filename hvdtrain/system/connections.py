"""This process's TCP connections, and cutting some of them, which ends whatever waits for them."""

import contextlib
import os
import socket
from collections.abc import Iterator, Set


def tcp_connections() -> set[tuple[int, str]]:
    """The TCP sockets that are open now, but for those that listen: the file descriptor, and what it refers to."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as same:
                listens = same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                is_tcp = same.family in (socket.AF_INET, socket.AF_INET6) and same.type == socket.SOCK_STREAM
                if is_tcp and not listens:
                    found.add((int(name), target))
    return found


def cut(connections: Set[tuple[int, str]]) -> None:
    """Shut down those that are still open. Their owner closes them; a number that is another's by now is left alone."""
    for descriptor, target in connections:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == target:
                with socket.socket(fileno=os.dup(descriptor)) as same:
                    same.shutdown(socket.SHUT_RDWR)


class OwnConnections:
    """Those that are opened in a block, to be cut at any time from then on, by any thread. What other threads connect
    to meanwhile counts as opened there.
    """

    def __init__(self) -> None:
        self._before: set[tuple[int, str]] | None = None
        self._opened: set[tuple[int, str]] = set()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        self._before = tcp_connections()
        try:
            yield
        finally:
            self._opened, self._before = tcp_connections() - self._before, None

    def cut(self) -> None:
        before = self._before
        cut(self._opened if before is None else tcp_connections() - before)
