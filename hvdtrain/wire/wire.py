"""What the parameter server's two ends say to each other goes through here, over the wire that the job has chosen.

A server has an endpoint, a `ps.desk.Desk`, whose calls return at once or return a future. Tensors in flight are not
copied: whoever sends one leaves it alone until it is answered. Nobody learns by itself that a peer has died: servers
keep a call open at every worker and workers at every server (see Wire.watch).
"""

import contextlib
import importlib
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from torch.distributed import Store
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.wire.messages import CONNECTION_ENDED
from hvdtrain.wire.rendezvous import leave
from hvdtrain.wire.requests import HEARTBEAT_S, WATCH, Requests
from hvdtrain.world.network import WIRE_KEY
from hvdtrain.world.place import World

WIRES = {"rpc": "hvdtrain.wire.rpc", "zmq": "hvdtrain.wire.zeromq"}  # a module each, whose `connect` returns a Wire
# Times the timeout that waits may take: whoever keeps the others waiting is found to be lost before that.
PATIENCE = 1.5


class Wire(ABC):
    """Carries calls between this rank and the others of its job.

    Args:
        requests: answers the peers.
        patience: seconds that a call may take which says nothing else.

    Attributes, of a wire that ranks can join while it is in use:
        endpoint: where this rank is reached.
        endpoints: where others are, by the number that they are called by. They are there before the first call.
        returning: ranks that come back where they were when they are killed. Calls to them wait meanwhile, as long as
            their timeouts, and what had no answer is sent again: their methods can stand to be called twice.
        returned: called with such a rank when its connection has ended, before anything is sent again.
    """

    endpoint: str

    def __init__(self, requests: Requests, patience: float) -> None:
        self.requests, self.patience = requests, patience
        self.endpoints: dict[int, str] = {}
        self.returning: frozenset[int] = frozenset()
        self.returned: Callable[[int], None] = lambda rank: None

    @abstractmethod
    def call(self, rank: int, method: str, *arguments: Any, timeout: float | None = None) -> "Future[Any]":
        """Call a method of the rank's endpoint; the future holds what that returned, or what went wrong. Leave tensors
        unchanged until then.

        Args:
            timeout: seconds after which it has gone wrong.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave without waiting for anybody."""

    def result(self, server: int, future: "Future[Any]") -> Any:
        """What a server answered, when it has. Failure, with its rank, where it broke off, raised, or took too long."""
        try:
            return future.wait()
        except Exception as error:  # the wire's own, or what the method raised
            raise server_failed(server, error) from error

    def ask(self, server: int, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Call a method of a server and wait for what it returns: see result."""
        return self.result(server, self.call(server, method, *arguments, timeout=timeout))

    def watch(self, rank: int, timeout: float, ended: Callable[[str], None]) -> None:
        """Have `ended` called, by another thread, when the rank leaves, with nothing, or is lost, with the reason.

        A rank whose process dies is lost at once; one that does not answer for as long as the timeout is lost then.
        """

        def answered(future: "Future[bool]") -> None:
            try:
                is_leaving = future.value()
            except Exception as error:
                ended(_reason(error))
                return
            ended("") if is_leaving else self.watch(rank, timeout, ended)

        self.call(rank, WATCH, timeout=timeout).add_done_callback(answered)

    def leave_together(self, world: World, store: Store, timeout: float, workers: Iterable[int] = ()) -> None:
        """Leave the others in order, then shut down without waiting again. Servers are done when all workers are.

        Args:
            workers: on a server, the workers that were not lost.
        """
        self.requests.leave()
        servers = range(world.servers)
        number = world.rank if world.is_server else world.servers + world.member
        leave(number, store, timeout, servers, [*servers, *(world.servers + member for member in workers)])
        self.close()

    def leave_servers(self, servers: Iterable[int], member: int) -> None:
        """Leave servers that come back: as leave_together, without the store, which may be gone."""
        self.requests.leave()
        for future in [self.call(server, "leave", member) for server in servers]:
            with contextlib.suppress(Exception):  # of a server that has left, and did not come back
                future.wait()
        self.close()

    def leave_now(self, problem: Failure | None = None) -> None:
        """Leave at once, alone: the others go on. They are told of a problem, if that is why."""
        self.requests.leave(problem)
        time.sleep(2 * HEARTBEAT_S)  # until all have been told
        self.close()


def start(world: World, store: Store, timeout: float, endpoint: object = None, kind: str = "rpc") -> Wire:
    """Join the other ranks.

    Args:
        timeout: seconds after which a silent peer is lost.
        endpoint: what answers peers, on a server.
        kind: one of WIRES.

    Raises:
        Failure: they could not be joined.
    """
    connect = importlib.import_module(WIRES[kind]).connect
    return cast(Wire, connect(world, store, PATIENCE * timeout, Requests(endpoint)))


def start_again(kind: str, address: str, endpoints: Mapping[int, str], timeout: float, endpoint: object) -> Wire:
    """Be reached at `address` again, in place of a rank that was killed, on one of config.run_config.OPEN_WIRES.

    Args:
        endpoints: where the others are; the rest as in start.

    Raises:
        Failure: another process is reached there.
    """
    connect, key = importlib.import_module(WIRES[kind]).connect_again, os.environ.get(WIRE_KEY, "")
    return cast(Wire, connect(address, endpoints, PATIENCE * timeout, Requests(endpoint), key))


def server_failed(rank: int, error: Exception) -> Failure:
    """What is said where a call to a server went wrong with this error."""
    return Failure(f"parameter server rank {rank} failed: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """What the wire means, in a few words."""
    text = str(error).split("\n\nAt:\n")[0]  # where in rpc itself an answer that is a future went wrong
    line = (text.strip().splitlines() or [type(error).__name__])[-1].split(" (this error originated at")[0]
    if line.startswith(("EOF", "eof", "ECONNRESET", "EPIPE", "process_vm_readv")):
        return CONNECTION_ENDED
    if late := re.search(r"set timeout \((\d+) ms\)", line):
        return f"no answer within {int(late[1]) / 1000:g} s (see --timeout)"
    return line
