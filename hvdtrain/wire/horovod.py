"""Joining Horovod, whoever started the ranks, and waiting for what it reduces."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import Failure
from hvdtrain.world.network import own_address
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store

# Gigabytes a second of payload that a float32 all-reduce of 528 MB between two processes moved, measured on one
# two-core host: MPI 2.0, Gloo 0.7. Over 1 Gbit/s TCP it is Gloo that wins, with 95 % of line rate against 60 %.
# So `auto`: MPI where mpirun started the ranks, as `compare` does, and Gloo where horovodrun --gloo or torchrun did.
_MPI_STARTERS = ("mpirun", "pmi")
# What Horovod 0.28.1 has where these are not set: bytes, and milliseconds.
DEFAULTS = {"HOROVOD_FUSION_THRESHOLD": str(128 * 2**20), "HOROVOD_CYCLE_TIME": "1"}


def join(world: World, store: "Store | None" = None, transport: str = "auto") -> str:
    """Start Horovod on this rank and name the backend that will carry its tensors.

    Args:
        world: every rank of the job calls this, servers included.
        store: a store that all ranks reach, where the starter knows nothing of Horovod (torchrun).
        transport: what carries tensors on CPUs, `gloo`, `mpi` or `auto`.

    Raises:
        Failure: the ranks Horovod found are not those that were started, or cannot use the backend asked for.
    """
    has_mpi = world.starter in _MPI_STARTERS
    if transport == "mpi" and not has_mpi:
        raise Failure(f"--ring-transport mpi is for ranks that mpirun starts, not {world.starter}: try --launcher mpi")
    if has_mpi and transport == "gloo":
        store, has_mpi = store or _session_store(world), False
    if has_mpi:
        # Horovod's thread waits in MPI all the time. If it spins there, it takes half of a core from the thread that
        # computes: VGG-16 at 64 px, two workers on two cores, 2.15 s a step against 1.31 s when it yields.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        operations = os.environ.setdefault("HOROVOD_CPU_OPERATIONS", "MPI")
        if operations.upper() != "MPI":  # Horovod would crash: nobody serves Gloo's rendezvous
            raise Failure(
                f"HOROVOD_CPU_OPERATIONS={operations} under {world.starter}: unset it, or start with horovodrun --gloo"
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
            f"Horovod sees rank {hvd.rank()} of {hvd.size()}, {world.starter} started rank {world.rank} of "
            f"{world.size}: start the job with mpirun or horovodrun of this environment"
        )
    return f"horovod-{operations.lower()}"


def _session_store(world: World) -> "Store":
    """A store of the ranks that mpirun started on this host, in its session folder, which is this user's alone.

    MPI could tell them an address, but cannot be left for Gloo: Horovod asks it after its end, which is an error.
    """
    from torch.distributed import FileStore

    folder = os.environ.get("PMIX_SERVER_TMPDIR")
    if not (folder and world.is_local):
        raise Failure(
            f"--ring-transport gloo under {world.starter} is for ranks on one host: start them with --launcher ssh"
        )
    return FileStore(os.path.join(folder, f"hvdtrain-{os.environ['PMIX_NAMESPACE']}"), world.size)


def is_joined() -> bool:
    import horovod.torch as hvd

    return bool(hvd.is_initialized())


def _become_horovodrun(world: World, store: "Store | None") -> None:
    """Set what horovodrun would have set, with the first rank serving the rendezvous, on loopback where it can."""
    host = socket.gethostname()
    hosts = [host]
    if store:
        store.set(f"host/{world.rank}", host)
        hosts = [name.decode() for name in store.multi_get([f"host/{rank}" for rank in range(world.size)])]
    assert len(hosts) == world.size
    if store and world.rank == 0:
        store.set("horovod", serve_rendezvous(world))
    _set_place(hosts, world.rank, store.get("horovod").decode() if store else "")


def serve_rendezvous(world: World) -> str:
    """Serve what ranks find each other by, once. Its address and port."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    address = own_address(world)
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    server.init([])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"{address}:{server.server_address[1]}"


def _set_place(hosts: Sequence[str], rank: int, rendezvous: str) -> None:
    """Set what horovodrun sets for a rank, where the ranks are on these hosts."""
    local_rank, local_size, cross_rank, cross_size = placement(hosts, rank)
    ours = {
        "RANK": rank, "SIZE": len(hosts), "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size,
        "CROSS_RANK": cross_rank, "CROSS_SIZE": cross_size, "HOSTNAME": hosts[rank],
    }  # fmt: skip
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in ours.items()})
    if rendezvous:
        address, port = rendezvous.rsplit(":", 1)
        os.environ.update(HOROVOD_GLOO_RENDEZVOUS_ADDR=address, HOROVOD_GLOO_RENDEZVOUS_PORT=port)


def join_anew(rank: int, hosts: Sequence[str], rendezvous: str) -> None:
    """Start Horovod over Gloo among other ranks than before; what the ranks before still did comes to nothing.

    Args:
        rank: this one's, from 0.
        hosts: of each rank.
        rendezvous: as serve_rendezvous says.

    Raises:
        Exception: Horovod's own, where not all came.
    """
    import horovod.torch as hvd

    hvd.shutdown()
    os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
    _set_place(hosts, rank, rendezvous)
    hvd.init()


def placement(hosts: Sequence[str], rank: int) -> tuple[int, int, int, int]:
    """A rank's local rank, local size, cross rank and cross size, as horovodrun gives them out.

    Its local rank is its place among the ranks of its host, its cross rank its host's among the hosts that have a rank
    of that local rank, in the order of their first ranks. Hosts may have any ranks, and as many as they like.

    Args:
        hosts: the host of each rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(other)
    here = ranks_of[hosts[rank]]
    local_rank = here.index(rank)
    across = [host for host, ranks in ranks_of.items() if len(ranks) > local_rank]
    return local_rank, len(here), across.index(hosts[rank]), len(across)


def broadcast(value: Any) -> Any:
    """The first rank's value, on every rank. Join first."""
    import horovod.torch as hvd

    return hvd.broadcast_object(value, root_rank=0, name="broadcast")


def leave() -> None:
    """Stop Horovod; the ranks may go on without it."""
    import horovod.torch as hvd

    hvd.shutdown()


def wait_for_any(handles: Sequence[int], as_long_as: Callable[[], bool] = lambda: True) -> int | None:
    """Which of these Horovod has reduced first, as an index; None once it is to wait no longer.

    Horovod's wait calls sched_yield without a pause. It takes from the thread that carries the bytes what a container's
    limit on processor time, or a busy core, has to give: over 1 Gbit/s with Gloo twice the processor time of a step.
    Here a pause is a fiftieth of what has been waited; a look costs some hundredths of a millisecond.
    """
    import horovod.torch as hvd

    since = time.perf_counter()
    while as_long_as():
        for number, handle in enumerate(handles):
            if hvd.poll(handle):
                return number
        time.sleep(min(5e-3, max(1e-4, (time.perf_counter() - since) / 50)))
    return None
