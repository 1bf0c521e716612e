"""The wire between the parameter server's two ends, of the kind that the job has chosen.

A server has an endpoint, a `ps.server.Server`, whose calls return at once or return a future.
Tensors in flight are not copied: the sender leaves a tensor alone until the call is answered. A
process does not learn by itself that a peer has died: servers keep a call open at every worker, and
workers at every server (see Wire.watch).
"""

import contextlib
import importlib
import math
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from torch.distributed import Store
from torch.futures import Future

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.network import WIRE_KEY
from hvdtrain.base.world.place import World
from hvdtrain.job.wire import heartbeat
from hvdtrain.job.wire.messages import CONNECTION_ENDED, NO_ANSWER, UNLIKE, no_answer
from hvdtrain.job.wire.rendezvous import leave
from hvdtrain.job.wire.requests import (
    ASKED_TO_LEAVE,
    HEARTBEAT_S,
    LEAVES,
    WATCH,
    Endpoint,
    Requests,
)

# The module of each wire, whose `connect` returns a Wire. LOCAL is between ranks of one process, and
# no option: see wire.local.
LOCAL = "local"
WIRES = {
    "rpc": "hvdtrain.job.wire.rpc",
    "zmq": "hvdtrain.job.wire.zeromq",
    LOCAL: "hvdtrain.job.wire.local",
}
# A rank is lost when it does not answer so many calls in a row, which take the timeout together.
WATCH_TRIES = 2


class Wire(ABC):
    """Carries calls between this rank and the others of its job.

    Args:
        requests: answers the peers.

    Attributes:
        lost: the ranks that are watched and lost, and why.
        asked_to_leave: called, again and again, when a rank that is watched had a SIGTERM.
        endpoint: where this rank is reached. This and the following are of wires that ranks can
            join while they are in use.
        endpoints: where other ranks are reached, before the first call.
        returning: the ranks that come back where they were when they are killed. Calls to them wait
            meanwhile, and a call that had no answer is sent again: their methods may be called
            twice.
        returned: called with such a rank when its connection has ended, before anything is sent
            again.
    """

    endpoint: str

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.lost: dict[int, str] = {}
        self.asked_to_leave: Callable[[], None] = lambda: None
        self.endpoints: dict[int, str] = {}
        self.returning: frozenset[int] = frozenset()
        self.returned: Callable[[int], None] = lambda rank: None

    @abstractmethod
    def call(
        self, rank: int, method: str, *arguments: Any, timeout: float | None = None
    ) -> "Future[Any]":
        """Calls a method of a rank's endpoint. Its tensors must not change before the answer.

        Args:
            rank: the rank to call.
            method: a name in the endpoint's `calls`.
            arguments: passed to the method.
            timeout: seconds after which the call has failed; None: there is no limit.

        Returns:
            A future of the method's result, or of what went wrong.
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves without waiting for anybody."""

    def condition(self) -> threading.Condition:
        """Returns a condition for a thread that waits for what this wire brings."""
        return threading.Condition()

    def end_when_silent(self, world: World, store: Store, timeout: float) -> None:
        """Ends this process when a rank that it needs is silent: see wire.heartbeat."""
        heartbeat.end_when_silent(world, store, timeout)

    def result(
        self,
        server: int,
        future: "Future[Any]",
        tell: Callable[[float], None] | None = None,
        every: float = math.inf,
    ) -> Any:
        """Blocks until a server has answered, as long as the server is not lost.

        Args:
            server: the server's rank.
            future: the call's future.
            tell: called with the seconds of waiting, each time after `every` more of them.
            every: see tell.

        Returns:
            The answer.

        Raises:
            Failure: the call failed, the server is lost, or its method raised; with its rank.
        """
        has_answered = threading.Event()
        began = time.monotonic()
        told = 1
        future.add_done_callback(lambda answered: has_answered.set())
        while not has_answered.wait(HEARTBEAT_S):
            if server in self.lost:
                raise server_failed(server, RuntimeError(self.lost[server]))
            waited = time.monotonic() - began
            if tell and waited > told * every:
                told += 1
                tell(waited)
        try:
            return future.value()
        except Exception as error:  # the wire's own, or what the method raised
            raise server_failed(server, error) from error

    def ask(self, server: int, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Calls a method of a server and blocks until it has answered: see call and result."""
        return self.result(server, self.call(server, method, *arguments, timeout=timeout))

    def watch(self, rank: int, timeout: float, ended: Callable[[str], None]) -> None:
        """Watches a rank, from another thread, until it ends.

        A rank whose process dies is lost at once. A rank that does not answer is lost after the
        timeout.

        Args:
            rank: the rank to watch.
            timeout: in seconds.
            ended: called with the reason when the rank is lost, with "" when it leaves.
        """
        self._watch(rank, timeout, ended, 0)

    def _watch(
        self, rank: int, timeout: float, ended: Callable[[str], None], unanswered: int
    ) -> None:
        """Keeps one call open at the rank; see watch.

        Args:
            rank, timeout, ended: see watch.
            unanswered: how many calls in a row had no answer. One may come too late where a job was
                suspended as a whole.
        """

        def answered(future: "Future[str]") -> None:
            try:
                answer = future.value()
            except Exception as error:
                why = _reason(error)
                if why.startswith(NO_ANSWER):
                    if unanswered + 1 < WATCH_TRIES:
                        self._watch(rank, timeout, ended, unanswered + 1)
                        return
                    why = no_answer(timeout)
                self.lost[rank] = why
                ended(why)
                return
            if answer == LEAVES:
                self.returning -= {rank}
                ended("")
                return
            if answer == ASKED_TO_LEAVE:
                self.asked_to_leave()
            self._watch(rank, timeout, ended, 0)

        self.call(rank, WATCH, timeout=timeout / WATCH_TRIES).add_done_callback(answered)

    def leave_together(
        self, world: World, store: Store, timeout: float, workers: Iterable[int] = ()
    ) -> None:
        """Leaves the others in order, then shuts down. Servers are done when all workers are.

        Args:
            world: where this rank is.
            store: the store that all ranks share.
            timeout: seconds after which a silent rank is lost.
            workers: on a server, the workers that were not lost.
        """
        self.requests.leave()
        servers = range(world.servers)
        number = world.rank if world.is_server else world.servers + world.member
        everybody = [*servers, *(world.servers + member for member in workers)]
        leave(number, store, timeout, servers, everybody)
        self.close()

    def leave_servers(self, servers: Iterable[int], member: int) -> None:
        """Leaves servers that come back: as leave_together, but the store may be gone."""
        self.requests.leave()
        calls = [(server, self.call(server, "leave", member)) for server in servers]
        for server, future in calls:
            with contextlib.suppress(Failure):  # the server has left, or did not come back
                self.result(server, future)
        self.close()

    def leave_now(self, problem: Failure | None = None) -> None:
        """Leaves at once and alone, while the others go on.

        Args:
            problem: why this process leaves, which the others are told; None: in order.
        """
        self.requests.leave(problem)
        time.sleep(2 * HEARTBEAT_S)  # until all have been told
        self.close()


def start(
    world: World, store: Store, timeout: float, endpoint: Endpoint | None = None, kind: str = "rpc"
) -> Wire:
    """Joins the other ranks.

    Args:
        world: where this rank is.
        store: the store that all ranks share.
        timeout: seconds after which a silent peer is lost.
        endpoint: answers the peers; None on a rank that is not called.
        kind: one of WIRES.

    Raises:
        Failure: the other ranks could not be joined.
    """
    connect = importlib.import_module(WIRES[kind]).connect
    return cast(Wire, connect(world, store, timeout, Requests(endpoint)))


def start_again(
    kind: str, address: str, endpoints: Mapping[int, str], timeout: float, endpoint: Endpoint
) -> Wire:
    """Listens at `address` again, in place of a rank that was killed.

    Args:
        kind: one of config.run_config.OPEN_WIRES.
        address: where the killed rank listened.
        endpoints: where the other ranks listen.
        timeout, endpoint: see start.

    Raises:
        Failure: another process listens there.
    """
    connect = importlib.import_module(WIRES[kind]).connect_again
    key = os.environ.get(WIRE_KEY, "")
    return cast(Wire, connect(address, endpoints, timeout, Requests(endpoint), key))


def server_failed(rank: int, error: Exception) -> Failure:
    """Returns the failure of a call to a server that ended with this error."""
    if UNLIKE in str(error):  # the workers' fault
        return Failure(UNLIKE)
    return Failure(f"parameter server rank {rank} failed: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """Returns the wire's error in a few words."""
    # Where a future's error has passed through rpc, a traceback follows.
    text, _, _ = str(error).partition("\n\nAt:\n")
    lines = text.strip().splitlines() or [type(error).__name__]
    line, _, _ = lines[-1].partition(" (this error originated at")
    if line.startswith(("EOF", "eof", "ECONNRESET", "EPIPE", "process_vm_readv")):
        return CONNECTION_ENDED
    late = re.search(r"set timeout \((\d+) ms\)", line)
    if late:
        return no_answer(int(late[1]) / 1000)
    return line
