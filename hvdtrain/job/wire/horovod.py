"""Joining Horovod, whoever started the ranks, and waiting for what it reduces."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.network import own_address
from hvdtrain.base.world.place import World
from hvdtrain.job.wire.heartbeat import while_served

if TYPE_CHECKING:
    from torch.distributed import Store

# On one host MPI is faster than Gloo (2.0 against 0.7 GB/s of payload, an all-reduce of 528 MB
# between two processes on two cores); over TCP at 1 Gbit/s Gloo is (95 % of line rate against
# 60 %). So `auto` is MPI where mpirun started the ranks, as `compare` does, and Gloo where
# horovodrun --gloo or torchrun did.
_MPI_STARTERS = ("mpirun", "pmi")
# Horovod 0.28.1's values where these are not set: bytes, and milliseconds.
DEFAULTS = {"HOROVOD_FUSION_THRESHOLD": str(128 * 2**20), "HOROVOD_CYCLE_TIME": "1"}
# How often a rendezvous looks whether it is to close, in seconds.
LOOK_EVERY_S = 0.05
# The shortest and the longest pause between two looks whether Horovod has reduced something, in
# seconds.
SHORTEST_PAUSE_S = 3e-4
LONGEST_PAUSE_S = 5e-3


def join(world: World, store: "Store | None" = None, transport: str = "auto") -> str:
    """Starts Horovod on this rank. Every rank of the job calls this, servers included.

    Args:
        world: where this rank is.
        store: a store that all ranks reach, where the starter knows nothing of Horovod (torchrun).
        transport: what carries tensors on CPUs: `gloo`, `mpi` or `auto`.

    Returns:
        The name of the backend that will carry tensors.

    Raises:
        Failure: Horovod has found other ranks than were started, or they cannot use the transport.
    """
    has_mpi = world.starter in _MPI_STARTERS
    if transport == "mpi" and not has_mpi:
        raise Failure(
            f"--ring-transport mpi is for ranks that mpirun starts, not {world.starter}: try "
            "--launcher mpi"
        )
    if has_mpi and transport == "gloo":
        store = store or _session_store(world)
        has_mpi = False
    if has_mpi:
        # Horovod's thread waits in MPI all the time. If it spins there, it takes half of a core
        # from the thread that computes: VGG-16 at 64 px, two workers on two cores, 2.15 s a step
        # against 1.31 s where it yields.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        operations = os.environ.setdefault("HOROVOD_CPU_OPERATIONS", "MPI")
        if operations.upper() != "MPI":  # Horovod would crash: nobody serves Gloo's rendezvous
            raise Failure(
                f"HOROVOD_CPU_OPERATIONS={operations} under {world.starter}: unset it, or start "
                "with horovodrun --gloo"
            )
    else:
        operations = "GLOO"
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
        if world.starter != "horovodrun":
            _become_horovodrun(world, store)
    import horovod.torch as hvd

    hvd.init()
    rank = world.rank if world.started is None else world.started
    if (hvd.rank(), hvd.size()) != (rank, world.size):
        raise Failure(
            f"Horovod sees rank {hvd.rank()} of {hvd.size()}, {world.starter} started rank "
            f"{world.rank} of {world.size}: start the job with mpirun or horovodrun of this "
            "environment"
        )
    return f"horovod-{operations.lower()}"


def _session_store(world: World) -> "Store":
    """Returns a store of the ranks that mpirun started on this host.

    It is in mpirun's session folder, which is this user's alone. MPI could tell the ranks an
    address, but cannot be left for Gloo: Horovod calls MPI after its end, which is an error.
    """
    from torch.distributed import FileStore

    folder = os.environ.get("PMIX_SERVER_TMPDIR")
    if not (folder and world.is_local):
        raise Failure(
            f"--ring-transport gloo under {world.starter} is for ranks on one host: start them with "
            "--launcher ssh"
        )
    return FileStore(os.path.join(folder, f"hvdtrain-{os.environ['PMIX_NAMESPACE']}"), world.size)


def is_joined() -> bool:
    import horovod.torch as hvd

    return bool(hvd.is_initialized())


@while_served()
def _become_horovodrun(world: World, store: "Store | None") -> None:
    """Sets the variables that horovodrun would have set.

    The first rank serves the rendezvous, on loopback where it can.
    """
    host = socket.gethostname()
    hosts = [host]
    rendezvous = ""
    if store:
        store.set(f"host/{world.rank}", host)
        names = store.multi_get([f"host/{rank}" for rank in range(world.size)])
        hosts = [name.decode() for name in names]
    assert len(hosts) == world.size
    if store:
        if world.rank == 0:
            store.set("horovod", Rendezvous(world).address)
        rendezvous = store.get("horovod").decode()
    _set_place(hosts, world.rank, rendezvous)


class Rendezvous:
    """Serves one rendezvous of Horovod's Gloo, where the ranks find each other.

    Args:
        world: where this rank is.

    Attributes:
        address: where it is served, as `address:port`.
    """

    def __init__(self, world: World) -> None:
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        host = own_address(world)
        self._server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
        self._server.init([])
        self.address = f"{host}:{self._server.server_address[1]}"
        serve = partial(self._server.serve_forever, LOOK_EVERY_S)
        threading.Thread(target=serve, daemon=True).start()

    def close(self) -> None:
        """Serves no more. Ranks that are still looking for others fail soon."""
        self._server.shutdown()
        self._server.server_close()


def _set_place(hosts: Sequence[str], rank: int, rendezvous: str) -> None:
    """Sets the variables that horovodrun sets for a rank, where the ranks are on these hosts.

    Args:
        hosts: the host of each rank.
        rank: this rank.
        rendezvous: the address of the first rank's Rendezvous; empty where this rank is alone.
    """
    local_rank, local_size, cross_rank, cross_size = placement(hosts, rank)
    ours = {
        "RANK": rank,
        "SIZE": len(hosts),
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "CROSS_RANK": cross_rank,
        "CROSS_SIZE": cross_size,
        "HOSTNAME": hosts[rank],
    }
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in ours.items()})
    if rendezvous:
        address, port = rendezvous.rsplit(":", 1)
        os.environ.update(HOROVOD_GLOO_RENDEZVOUS_ADDR=address, HOROVOD_GLOO_RENDEZVOUS_PORT=port)
    else:
        os.environ.pop("HOROVOD_GLOO_RENDEZVOUS_ADDR", None)


def join_anew(rank: int, hosts: Sequence[str], rendezvous: str) -> None:
    """Starts Horovod over Gloo among other ranks than before, once it was stopped: see leave.

    Args:
        rank: this rank, from 0.
        hosts: the host of each rank.
        rendezvous: see _set_place.

    Raises:
        Exception: Horovod's exception, where not all ranks came.
    """
    import horovod.torch as hvd

    os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
    _set_place(hosts, rank, rendezvous)
    hvd.init()


def placement(hosts: Sequence[str], rank: int) -> tuple[int, int, int, int]:
    """Returns a rank's local rank, local size, cross rank and cross size, as horovodrun does.

    The local rank is the rank's place among the ranks of its host. The cross rank is the place of
    its host among the hosts that have a rank of the same local rank, in the order of their first
    ranks. Hosts may have any ranks, and any number of them.

    Args:
        hosts: the host of each rank.
        rank: the rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(other)
    here = ranks_of[hosts[rank]]
    local_rank = here.index(rank)
    across = [host for host, ranks in ranks_of.items() if len(ranks) > local_rank]
    return local_rank, len(here), across.index(hosts[rank]), len(across)


def broadcast(value: Any) -> Any:
    """Returns the first rank's value, on every rank, after join."""
    import horovod.torch as hvd

    return hvd.broadcast_object(value, root_rank=0, name="broadcast")


def leave() -> None:
    """Stops Horovod, if it runs; the ranks may go on without it. What is under way fails."""
    import horovod.torch as hvd

    hvd.shutdown()


def wait_for_any(
    handles: Sequence[int],
    as_long_as: Callable[[], bool] = lambda: True,
    without_pause_s: float = 0.0,
) -> int | None:
    """Blocks until Horovod has reduced one of these.

    Horovod's wait calls sched_yield without a pause, and takes processor time from the thread that
    carries the bytes: over 1 Gbit/s with Gloo twice the processor time of a step. Here a pause
    takes a fiftieth of the time waited so far; a look costs some hundredths of a millisecond.

    Args:
        handles: Horovod's handles.
        as_long_as: returns whether to go on waiting.
        without_pause_s: how many seconds to look again and again, before the first pause.

    Returns:
        The index of a handle that is reduced; None where the wait was ended.
    """
    import horovod.torch as hvd

    since = time.perf_counter()
    while as_long_as():
        for number, handle in enumerate(handles):
            if hvd.poll(handle):
                return number
        waited = time.perf_counter() - since
        if waited < without_pause_s:
            os.sched_yield()
            continue
        time.sleep(min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, waited / 50)))
    return None
