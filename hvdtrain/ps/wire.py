"""What the parameter server's two ends say to each other goes through here, over the wire that the job has chosen.

A server has an endpoint, a `ps.desk.Desk`, whose calls return at once or return a future. Tensors in flight are not
copied: whoever sends one leaves it alone until it is answered. Nobody learns by itself that a peer has died: servers
keep a call open at every worker and workers at every server (see watch).
"""

import contextlib
import importlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

from torch.distributed import Store
from torch.futures import Future

from hvdtrain.errors import Failure
from hvdtrain.ps.messages import CONNECTION_ENDED
from hvdtrain.ps.requests import HEARTBEAT_S, WATCH, Requests
from hvdtrain.world.network import WIRE_KEY
from hvdtrain.world.place import World
from hvdtrain.world.rendezvous import leave

WIRES = {"rpc": "hvdtrain.ps.rpc", "zmq": "hvdtrain.ps.zeromq"}  # a module each, whose `connect` returns a Wire
# Times the timeout that waits may take: whoever keeps the others waiting is found to be lost before that.
PATIENCE = 1.5


class Wire(Protocol):
    """Carries calls between the ranks of a job."""

    def call(self, rank: int, method: str, arguments: tuple[Any, ...], timeout: float) -> "Future[Any]":
        """Call a method of the rank's endpoint; the future holds what that returned, or what went wrong.

        Args:
            timeout: seconds after which it has gone wrong.
        """

    def close(self) -> None:
        """Leave without waiting for anybody."""


class OpenWire(Wire, Protocol):
    """A wire that ranks can join while it is in use.

    Attributes:
        endpoint: where this rank is reached.
        endpoints: where others are, by the number that they are called by.
        returning, returned: see wait_for_return.
    """

    endpoint: str
    endpoints: dict[int, str]
    returning: frozenset[int]
    returned: Callable[[int], None]


_wire: Wire  # of this process
_requests: Requests
_patience: float  # seconds


def start(world: World, store: Store, timeout: float, endpoint: object = None, kind: str = "rpc") -> None:
    """Join the other ranks.

    Args:
        timeout: seconds after which a silent peer is lost.
        endpoint: what answers peers, on a server.
        kind: one of WIRES.

    Raises:
        Failure: they could not be joined.
    """
    global _wire, _requests, _patience
    _requests, _patience = Requests(endpoint), PATIENCE * timeout
    _wire = importlib.import_module(WIRES[kind]).connect(world, store, _patience, _requests)


def start_again(kind: str, own: str, endpoints: Mapping[int, str], timeout: float, endpoint: object) -> None:
    """Be reached at `own` again, in place of a rank that was killed, on one of config.run_config.OPEN_WIRES.

    Args:
        endpoints: where the others are; the rest as in start.

    Raises:
        Failure: another process is reached there.
    """
    global _wire, _requests, _patience
    _requests, _patience = Requests(endpoint), PATIENCE * timeout
    key = os.environ.get(WIRE_KEY, "")
    _wire = importlib.import_module(WIRES[kind]).connect_again(own, endpoints, _patience, _requests, key)


def wait_for_return(ranks: Iterable[int], returned: Callable[[int], None] = lambda rank: None) -> None:
    """From now on, have calls to these ranks wait, as long as their timeouts, when one of them is killed: it comes back
    where it was, and what it had not answered is sent again. Its methods can stand to be called twice.

    Args:
        returned: called with the rank when its connection has ended.
    """
    opened = cast(OpenWire, _wire)
    opened.returned, opened.returning = returned, frozenset(ranks)


def call(rank: int, method: str, *arguments: Any, timeout: float | None = None) -> "Future[Any]":
    """Call a method of a rank's endpoint; the future holds what it returned. Leave tensors unchanged until then."""
    return _wire.call(rank, method, arguments, _patience if timeout is None else timeout)


def result(rank: int, future: "Future[Any]") -> Any:
    """What a server answered, when it has. Failure, with its rank, where it broke off, raised, or took too long."""
    try:
        return future.wait()
    except Exception as error:  # the wire's own, or what the method raised
        raise Failure(f"parameter server rank {rank} failed: {_reason(error)}") from error


def ask(server: int, method: str, *arguments: Any, timeout: float | None = None) -> Any:
    """Call a method of a server and wait for what it returns: see result."""
    return result(server, call(server, method, *arguments, timeout=timeout))


def watch(rank: int, timeout: float, ended: Callable[[str], None]) -> None:
    """Have `ended` called, by another thread, when the rank leaves, with nothing, or is lost, with the reason.

    A rank whose process dies is lost at once; one that does not answer for as long as the timeout is lost then.
    """

    def look() -> None:
        call(rank, WATCH, timeout=timeout).add_done_callback(answered)

    def answered(future: "Future[bool]") -> None:
        try:
            is_leaving = future.value()
        except Exception as error:
            ended(_reason(error))
            return
        ended("") if is_leaving else look()

    look()


def known_endpoints() -> dict[int, str]:
    """Where the others are reached."""
    return dict(cast(OpenWire, _wire).endpoints)


def own_endpoint() -> str:
    """Where this rank is reached, on one of config.run_config.OPEN_WIRES."""
    return cast(OpenWire, _wire).endpoint


def meet(rank: int, endpoint: str) -> None:
    """Somebody joins who will be called by this number, and is reached there."""
    cast(OpenWire, _wire).endpoints[rank] = endpoint


def stop(world: World, store: Store, timeout: float, there: Iterable[int] = ()) -> None:
    """Leave the others in order, then shut down without waiting again. Servers are done when all workers are.

    Args:
        there: on a server, the workers that were not lost.
    """
    _requests.leave()
    servers = range(world.servers)
    number = world.rank if world.is_server else world.servers + world.member
    leave(number, store, timeout, servers, [*servers, *(world.servers + member for member in there)])
    _wire.close()


def leave_servers(servers: Iterable[int], member: int) -> None:
    """Leave servers that come back: as stop, without the store, which may be gone."""
    _requests.leave()
    for future in [call(server, "leave", member) for server in servers]:
        with contextlib.suppress(Exception):  # of a server that has left, and did not come back
            future.wait()
    _wire.close()


def give_up_on(rank: int) -> None:
    """This one does not come back: what it has not answered fails when its connection ends."""
    opened = cast(OpenWire, _wire)
    opened.returning -= {rank}


def fail(problem: Failure) -> None:
    """Tell the others why this process ends, and leave."""
    _requests.fail(problem)
    time.sleep(2 * HEARTBEAT_S)  # until all have been told
    _wire.close()


def hang_up() -> None:
    """Leave at once, alone: the others go on."""
    _requests.leave()
    time.sleep(2 * HEARTBEAT_S)  # until all have been told
    _wire.close()


def _reason(error: BaseException) -> str:
    """What the wire means, in a few words."""
    text = str(error).split("\n\nAt:\n")[0]  # where in rpc itself an answer that is a future went wrong
    line = (text.strip().splitlines() or [type(error).__name__])[-1].split(" (this error originated at")[0]
    if line.startswith(("EOF", "eof", "ECONNRESET", "EPIPE", "process_vm_readv")):
        return CONNECTION_ENDED
    if late := re.search(r"set timeout \((\d+) ms\)", line):
        return f"no answer within {int(late[1]) / 1000:g} s (see --timeout)"
    return line
