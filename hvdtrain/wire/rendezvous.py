"""How the ranks of a job find each other where torch.distributed, not Horovod, carries the bytes."""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from hvdtrain.errors import Failure
from hvdtrain.system.deadline import or_exit
from hvdtrain.wire import horovod
from hvdtrain.world.network import own_address
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore


def open_store(world: World, timeout: float) -> "Store":
    """A key-value store that all ranks share.

    Under torchrun it is torchrun's own, or at MASTER_ADDR and MASTER_PORT. Elsewhere the first rank listens on a port
    that the system chooses and tells the others through Horovod, which every other starter can start. MPI cannot be
    joined twice: who wants Horovod as well joins it before.
    """
    from torch.distributed import TCPStore

    limit = timedelta(seconds=timeout)
    if "MASTER_ADDR" in os.environ and world.starter in ("torchrun", "env", "srun"):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if world.rank > 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return TCPStore(host, port, is_master=False, timeout=limit)
        return serve_store(host, port, timeout, only_there=world.is_local)
    if world.size == 1:
        return serve_store("127.0.0.1", 0, timeout)
    if world.starter in ("env", "srun"):
        raise Failure(f"ranks started by {world.starter} need MASTER_ADDR and MASTER_PORT to find each other")
    with or_exit(timeout, f"rank {world.rank} did not find all {world.size} ranks"):
        stays = horovod.is_joined()
        if not stays:
            horovod.join(world, transport="gloo" if world.elastic else "auto")  # MPI could not be left for Gloo
        store = serve_store(own_address(world), 0, timeout) if world.rank == 0 else None
        host, port = horovod.broadcast((own_address(world), store.port) if store else None)
        if not stays:
            horovod.leave()
    return store or TCPStore(host, port, is_master=False, timeout=limit)


def store_address(world: World, store: "Store") -> tuple[str, int]:
    """Where the store is that open_store has opened."""
    if "MASTER_ADDR" in os.environ and world.starter in ("torchrun", "env", "srun"):
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return own_address(world), cast("TCPStore", store).port


def reach_store(host: str, port: int, timeout: float) -> "Store":
    """The store of a running job. Failure where nobody is there."""
    from torch.distributed import TCPStore

    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError:
        raise Failure(
            f"nobody listens at {host}, port {port}: its job has ended, or is in a network of its own"
        ) from None


def serve_store(host: str, port: int, timeout: float, only_there: bool = True) -> "TCPStore":
    """A new store there; see _listener for the rest. Failure where the port is taken."""
    from torch.distributed import TCPStore

    # A TCPStore that opens its own socket listens on every interface; this one listens where it is told.
    listener, host = _listener(host, port, only_there)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _listener(host: str, port: int, only_there: bool) -> tuple[socket.socket, str]:
    """A socket that listens where others connect to `host`, and an address at which this process reaches it.

    Where the name or address is not this host's own but that of a service or NAT before it, or means loopback on its
    own host (Debian's 127.0.1.1), that is every interface, as with torch's env://.

    Args:
        port: 0 for one that the system chooses.
        only_there: listen at this address, and nowhere else.

    Raises:
        Failure: the name does not resolve, or the port is taken.
    """
    try:
        addresses = sorted(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # IPv4 first
        family, address = addresses[0][0], str(addresses[0][4][0])
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
        raise Failure(f"the first rank cannot listen at {host}, port {port}: {why}; choose another") from None


def lacking(store: "Store", keys: Mapping[int, str], timeout: float) -> list[int]:
    """Wait until the store has each rank's key, for as long as the timeout at most; the ranks whose key it lacks then.

    Raises:
        RuntimeError: nobody serves the store any more.
    """
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout))
    except RuntimeError:
        return [rank for rank, key in keys.items() if not store.check([key])]
    return []


def leave(rank: int, store: "Store", timeout: float, others: Iterable[int], everybody: Iterable[int]) -> None:
    """Wait, for as long as the timeout at most, until others have called this too. The first rank, which serves the
    store, leaves last.

    Args:
        others: whom to wait for.
        everybody: whom the first rank waits for.
    """
    limit = timedelta(seconds=timeout)
    store.set(f"done/{rank}", "")
    store.wait([f"done/{other}" for other in others], limit)
    store.set(f"left/{rank}", "")
    if rank == 0:
        store.wait([f"left/{other}" for other in everybody], limit)
