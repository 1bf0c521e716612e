"""Turns of `hvdtrain bench`: the jobs of all backends run at once, and measure one at a time.

A launcher starts guards. A guard starts the rank as its child, listens to `hvdtrain bench`, and
stops the rank while other backends measure (SIGSTOP): Horovod, MPI and rpc over shared memory poll
even when they have nothing to do, and would take cores from the others. Guards end with
`hvdtrain bench`, and ranks with their guards.

    mpirun -np 2 python -Pm hvdtrain.tools.bench.turns ADDRESSES BACKEND SERVERS MODE TIMES \\
        BUCKET_MB
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.base.system.memory import importing
from hvdtrain.base.system.parent import die_with_parent
from hvdtrain.base.world.network import own_addresses

LOOK_S = 0.5  # seconds between two checks of the jobs, until all ranks have connected
CONNECT_S = 5.0
# The variable of ranks' environment that has the key. Connections without the key are closed.
KEY = "HVDTRAIN_BENCH_KEY"


class Gone(Exception):
    """A rank of this backend has ended."""


class Turns:
    """The end of `hvdtrain bench`, which tells each backend's ranks when it is their turn.

    Args:
        folder: The folder for a Unix socket, which ranks on this machine reach from any network
            namespace; None to listen on TCP for ranks on other hosts.

    Attributes:
        addresses: The addresses to connect to, `10.0.0.1,10.0.1.1:4711`, or the socket's path.
        key: The line that ranks send first, within CONNECT_S.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder:
            self.addresses = str(folder / "turns")
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self.addresses)
            self._listener.listen()
        else:
            self._listener = socket.create_server(("", 0))
            port = self._listener.getsockname()[1]
            reachable = [address for address in own_addresses() if not address.startswith("127.")]
            self.addresses = f"{','.join(reachable or ['127.0.0.1'])}:{port}"
        self.key = secrets.token_hex(16)
        self._listener.settimeout(LOOK_S)
        self._ranks: dict[str, list[TextIO]] = {}

    def meet(self, ranks: int, look: Callable[[], object]) -> None:
        """Blocks until the ranks of all backends are connected and ready, then stops them.

        Args:
            ranks: The number of ranks of all backends together.
            look: Called again and again; raises if a job has ended.
        """
        while sum(map(len, self._ranks.values())) < ranks:
            look()
            with contextlib.suppress(TimeoutError):
                rank, _ = self._listener.accept()
                with rank:  # the file keeps the connection open
                    file = self._authenticate(rank)
                backend = file.readline() if file else ""
                if file and backend:
                    self._ranks.setdefault(json.loads(backend), []).append(file)
        for backend in self._ranks:
            self._tell(backend, "stop")

    def _authenticate(self, rank: socket.socket) -> TextIO | None:
        """Returns a file for the connection; None if the key is missing or wrong."""
        rank.settimeout(CONNECT_S)
        file = rank.makefile("rw")
        try:
            key = file.readline(100).strip()
        except (OSError, ValueError):
            key = ""
        if not secrets.compare_digest(key.encode(), self.key.encode()):
            file.close()
            return None
        rank.settimeout(None)
        return file

    def measure(self, backend: str, size: int) -> dict[str, Any]:
        """Has a backend's workers do the operation once, with a vector of `size` bytes.

        Returns:
            What its last worker measured; see ranks.take_part.

        Raises:
            Gone: A rank has ended.
        """
        [measured] = [answer for answer in self._tell(backend, size) if answer]
        self._tell(backend, "stop")
        return measured

    def _tell(self, backend: str, message: int | str) -> list[Any]:
        """Sends a message to a backend's guards; returns the answers. Raises Gone if one ended."""
        try:
            for rank in self._ranks[backend]:
                rank.write(f"{json.dumps(message)}\n")
                rank.flush()
            return [json.loads(rank.readline()) for rank in self._ranks[backend]]
        except (OSError, ValueError):
            raise Gone(backend) from None

    def close(self) -> None:
        """Closes all connections, so that guards end, and ranks with them."""
        self._listener.close()
        for ranks in self._ranks.values():
            for rank in ranks:
                with contextlib.suppress(OSError):
                    rank.close()


def main() -> None:
    """Starts a rank and guards it."""
    addresses, backend, *arguments = sys.argv[1:]
    guard_end, rank_end = socket.socketpair()
    child = os.fork()
    if not child:
        die_with_parent(signal.SIGKILL)  # SIGKILL ends a stopped process, too
        guard_end.close()
        with importing():
            from hvdtrain.tools.bench.ranks import take_part  # imports torch

        take_part(backend, arguments, rank_end.makefile("rw"))
        return
    rank_end.close()
    is_over = False
    try:
        is_over = _guard(child, guard_end.makefile("rw"), _connect(addresses), backend)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    sys.exit(0 if is_over else 1)


def _guard(child: int, rank: TextIO, bench: TextIO, backend: str) -> bool:
    """Stops and continues the rank as `hvdtrain bench` says.

    Returns:
        True once `hvdtrain bench` has ended; False once the rank has.
    """
    role = rank.readline().strip()
    answer = json.dumps(backend) if role else ""
    while answer:
        bench.write(f"{answer}\n")
        bench.flush()
        message = bench.readline()
        if not message:
            return True
        is_turn = json.loads(message) != "stop"
        os.kill(child, signal.SIGCONT if is_turn else signal.SIGSTOP)
        answer = "null"
        if is_turn and role == "worker":  # servers get no messages: they serve workers
            rank.write(message)
            rank.flush()
            answer = rank.readline().strip()
    return False


def _connect(addresses: str) -> TextIO:
    """Connects to `hvdtrain bench` at the first address that answers; exits if none does."""
    hosts, _, port = addresses.rpartition(":")
    for host in hosts.split(","):
        with contextlib.suppress(OSError):
            if addresses.startswith("/"):
                bench = socket.socket(socket.AF_UNIX)
                bench.connect(addresses)
            else:
                bench = socket.create_connection((host, int(port)), CONNECT_S)
            bench.settimeout(None)
            file = bench.makefile("rw")
            file.write(f"{os.environ.get(KEY, '')}\n")
            file.flush()
            return file
    sys.exit(f"hvdtrain: {socket.gethostname()} cannot reach `hvdtrain bench` at {addresses}")


if __name__ == "__main__":
    main()
