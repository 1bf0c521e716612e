"""How the ranks of a job find each other by a store of torch.distributed."""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from hvdtrain.base.errors import Failure
from hvdtrain.base.system.deadline import or_exit
from hvdtrain.base.system.variables import whole_number
from hvdtrain.base.world.network import own_address
from hvdtrain.base.world.place import World
from hvdtrain.job.wire import horovod
from hvdtrain.job.wire.heartbeat import begin_beating, stop_watching, wait_for_ranks, while_served

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore


def open_store(world: World, timeout: float, within: float = 0.0) -> "Store":
    """Opens the key-value store that all ranks share; this rank beats in it from now on.

    Under torchrun it is torchrun's store, or one at MASTER_ADDR and MASTER_PORT. Elsewhere the
    first rank listens on a port that the system chooses, and tells the others through Horovod,
    which every other starter can start. MPI cannot be joined twice: a process that wants Horovod as
    well joins it before.

    Args:
        world: where this rank is.
        timeout: seconds after which a silent rank is lost.
        within: seconds in which all ranks come, if those are more.
    """
    store = _open_store(world, max(timeout, within))
    begin_beating(store, world.rank, timeout)
    return store


def _open_store(world: World, timeout: float) -> "Store":
    from torch.distributed import TCPStore

    limit = timedelta(seconds=timeout)
    if "MASTER_ADDR" in os.environ and world.starter in ("torchrun", "env", "srun"):
        host, port = _master()
        if world.rank > 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return TCPStore(host, port, is_master=False, timeout=limit)
        return serve_store(host, port, timeout, only_there=world.is_local)
    if world.size == 1:
        return serve_store("127.0.0.1", 0, timeout)
    if world.starter in ("env", "srun"):
        raise Failure(
            f"ranks started by {world.starter} need MASTER_ADDR and MASTER_PORT to find each other"
        )
    with or_exit(timeout, f"rank {world.rank} did not find all {world.size} ranks"):
        stays = horovod.is_joined()
        if not stays:
            # An elastic ring needs Gloo later, and MPI could not be left for it.
            horovod.join(world, transport="gloo" if world.elastic else "auto")
        store = serve_store(own_address(world), 0, timeout) if world.rank == 0 else None
        host, port = horovod.broadcast((own_address(world), store.port) if store else None)
        if not stays:
            horovod.leave()
    return store or TCPStore(host, port, is_master=False, timeout=limit)


def store_address(world: World, store: "Store") -> tuple[str, int]:
    """Returns the host and port of the store that open_store has opened."""
    if "MASTER_ADDR" in os.environ and world.starter in ("torchrun", "env", "srun"):
        return _master()
    return own_address(world), cast("TCPStore", store).port


def _master() -> tuple[str, int]:
    """Returns where the starter lets the first rank listen.

    Raises:
        UsageError: MASTER_PORT is no port.
    """
    return os.environ["MASTER_ADDR"], whole_number(os.environ, "MASTER_PORT", most=65535)


def reach_store(host: str, port: int, timeout: float) -> "Store":
    """Returns the store of a running job.

    Raises:
        Failure: nobody listens there.
    """
    from torch.distributed import TCPStore

    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError:
        raise Failure(
            f"nobody listens at {host}, port {port}: its job has ended, or is in a network of its "
            "own"
        ) from None


def serve_store(host: str, port: int, timeout: float, only_there: bool = True) -> "TCPStore":
    """Serves a new store.

    Args:
        host, port, only_there: see _listener.
        timeout: seconds that a wait for a key may take.

    Raises:
        Failure: the port is taken.
    """
    from torch.distributed import TCPStore

    # A TCPStore that opens a socket itself listens on every interface.
    listener, host = _listener(host, port, only_there)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def _listener(host: str, port: int, only_there: bool) -> tuple[socket.socket, str]:
    """Returns a socket that listens where others connect to `host`, and an address of it.

    The socket listens on every interface, as with torch's env://, where the name or address belongs
    to a service or NAT before this host, or means loopback on this host (Debian's 127.0.1.1).

    Args:
        host: a name or address.
        port: 0: the system chooses one.
        only_there: listen at this address, and nowhere else.

    Returns:
        The socket, and an address at which this process reaches it.

    Raises:
        Failure: the name does not resolve, or the port is taken.
    """
    try:
        addresses = sorted(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # IPv4 first
        family, *_, sockaddr = addresses[0]
        address = str(sockaddr[0])
        if only_there or not ipaddress.ip_address(address).is_loopback:
            try:
                return socket.create_server((address, port), family=family), address
            except OSError as error:
                if only_there or error.errno != errno.EADDRNOTAVAIL:
                    raise
        if family == socket.AF_INET6:
            return socket.create_server(("", port), family=family, dualstack_ipv6=True), "::1"
        return socket.create_server(("", port)), "127.0.0.1"
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise Failure(
            f"the first rank cannot listen at {host}, port {port}: {why}; choose another"
        ) from None


@while_served()
def leave(
    rank: int, store: "Store", timeout: float, others: Iterable[int], everybody: Iterable[int]
) -> None:
    """Blocks until other ranks have called this too, as long as they are alive.

    The first rank, which serves the store, leaves last.

    Args:
        rank: this rank.
        store: the store that all ranks share.
        timeout: seconds after which a silent rank is lost.
        others: the ranks to wait for.
        everybody: the ranks that the first one waits for.
    """
    store.set(f"done/{rank}", "")
    wait_for_ranks(store, {other: f"done/{other}" for other in others}, timeout, rank)
    store.set(f"left/{rank}", "")
    if rank == 0:
        wait_for_ranks(store, {other: f"left/{other}" for other in everybody}, timeout)
    stop_watching()
