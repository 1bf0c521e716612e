"""Who measures when: the jobs of all backends are there at once, and take turns.

What a starter starts is not the rank that measures but its guard, which listens to `hvdtrain bench` and stops the rank,
its child, while other backends measure (SIGSTOP). For Horovod, MPI and rpc over shared memory poll, also where there is
nothing to do, and would take cores from the others. Guards end with `hvdtrain bench`, and ranks with their guards.

    mpirun -np 2 python -Pm hvdtrain.bench.turns ADDRESSES BACKEND SERVERS MODE TIMES OP BUCKET_MB
"""

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.system.memory import importing
from hvdtrain.system.parent import die_with_parent
from hvdtrain.world.network import own_addresses

LOOK_S = 0.5  # how often jobs are looked at whose ranks have not come yet
CONNECT_S = 5.0


class Gone(Exception):
    """A rank of this backend has ended."""


class Turns:
    """The end of `hvdtrain bench`: it tells each backend's ranks when it is their turn.

    Args:
        folder: of a socket by which ranks on this machine come here, from networks of their own too; None where they
            are on others.

    Attributes:
        addresses: where ranks come to, as they are told: `10.0.0.1,10.0.1.1:4711`, or a path.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder:
            self.addresses = str(folder / "turns")
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self.addresses)
            self._listener.listen()
        else:
            self._listener = socket.create_server(("", 0))
            elsewhere = [address for address in own_addresses() if not address.startswith("127.")]
            self.addresses = f"{','.join(elsewhere or ['127.0.0.1'])}:{self._listener.getsockname()[1]}"
        self._listener.settimeout(LOOK_S)
        self._ranks: dict[str, list[TextIO]] = {}

    def meet(self, ranks: int, look: Callable[[], object]) -> None:
        """Return when so many ranks, of all backends together, have come and are ready, and stop them.

        Args:
            look: called again and again; raises where a job has ended.
        """
        while sum(map(len, self._ranks.values())) < ranks:
            look()
            with contextlib.suppress(TimeoutError):
                rank, _ = self._listener.accept()
                with rank:  # which the file keeps open
                    rank.settimeout(None)
                    file = rank.makefile("rw")
                if hello := file.readline():
                    self._ranks.setdefault(json.loads(hello), []).append(file)
        for backend in self._ranks:
            self._tell(backend, "stop")

    def measure(self, backend: str, size: int) -> dict[str, Any]:
        """What one of the backend's workers measured when all of them did it once, with a vector of so many bytes.

        Raises:
            Gone: a rank has ended.
        """
        [measured] = [answer for answer in self._tell(backend, size) if answer]
        self._tell(backend, "stop")
        return measured

    def _tell(self, backend: str, what: int | str) -> list[Any]:
        try:
            for rank in self._ranks[backend]:
                rank.write(f"{json.dumps(what)}\n")
                rank.flush()
            return [json.loads(rank.readline()) for rank in self._ranks[backend]]
        except (OSError, ValueError):
            raise Gone(backend) from None

    def close(self) -> None:
        """All guards end, and the ranks with them."""
        self._listener.close()
        for rank in [rank for ranks in self._ranks.values() for rank in ranks]:
            with contextlib.suppress(OSError):
                rank.close()


def main() -> None:
    addresses, backend, *words = sys.argv[1:]
    guards, ranks = socket.socketpair()
    child = os.fork()
    if not child:
        die_with_parent(signal.SIGKILL)  # its guard, and stopped or not
        guards.close()
        with importing():
            from hvdtrain.bench.ranks import take_part  # imports torch

        take_part(backend, words, ranks.makefile("rw"))
        return
    ranks.close()
    is_over = False
    try:
        is_over = _guard(child, guards.makefile("rw"), _connect(addresses), backend)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    sys.exit(0 if is_over else 1)


def _guard(child: int, rank: TextIO, bench: TextIO, backend: str) -> bool:
    """Stop the rank and let it go on as `hvdtrain bench` says; whether that ended, and not the rank."""
    role = rank.readline().strip()
    answer = json.dumps(backend) if role else ""
    while answer:
        bench.write(f"{answer}\n")
        bench.flush()
        told = bench.readline()
        if not told:
            return True
        is_turn = json.loads(told) != "stop"
        os.kill(child, signal.SIGCONT if is_turn else signal.SIGSTOP)
        answer = "null"
        if is_turn and role == "worker":  # a server serves, and is told nothing
            rank.write(told)
            rank.flush()
            answer = rank.readline().strip()
    return False


def _connect(addresses: str) -> TextIO:
    hosts, _, port = addresses.rpartition(":")
    for host in hosts.split(","):
        with contextlib.suppress(OSError):
            if addresses.startswith("/"):
                bench = socket.socket(socket.AF_UNIX)
                bench.connect(addresses)
            else:
                bench = socket.create_connection((host, int(port)), CONNECT_S)
            bench.settimeout(None)
            return bench.makefile("rw")
    sys.exit(f"hvdtrain: {socket.gethostname()} cannot reach `hvdtrain bench` at {addresses}")


if __name__ == "__main__":
    main()
