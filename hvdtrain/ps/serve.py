"""What a server does with its life: it serves until every worker is done or lost."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from hvdtrain.config.run_config import OPEN_WIRES, RunConfig
from hvdtrain.errors import Failure
from hvdtrain.numerics.compression import Compressor
from hvdtrain.numerics.optimizers import make_optimizer
from hvdtrain.ps.bucket import Bucket, Policy, no_ledger
from hvdtrain.ps.crash_memory import CrashMemory, SavedState
from hvdtrain.ps.join_info import RestartInfo, read_restart_info, servers_return, write_restart_info
from hvdtrain.ps.leases import Leases
from hvdtrain.ps.ledger import LeaseLedger, Ledger
from hvdtrain.ps.membership import Membership
from hvdtrain.ps.server import Server
from hvdtrain.ps.server_metrics import Load, ServerMetrics, last_row
from hvdtrain.ps.shared import SharedMemory
from hvdtrain.ps.wire import Wire, start, start_again
from hvdtrain.ps.worker_monitor import WorkerMonitor
from hvdtrain.world.job import Job
from hvdtrain.world.preempt import deferred_sigterm
from hvdtrain.world.rendezvous import reach_store, serve_store, store_address

if TYPE_CHECKING:
    from torch.distributed import Store


_BUCKET = "bucket "  # before a bucket's number, what ps.crash_memory has of it
OVER_S = 3.0  # for how long one that was killed at the end is there for workers that have not heard of that


class MakePolicy(Protocol):
    def __call__(self, workers: int, config: RunConfig) -> Policy: ...


@dataclass(frozen=True)
class KilledServer:
    """A server that was killed, in whose place this process is.

    Attributes:
        memory_fd: a file descriptor of the memory of ps.crash_memory.
        store: where the store was that all ranks share.
        at: in seconds since 1970.
    """

    memory_fd: int
    store: tuple[str, int]
    at: float


def serve(
    job: Job, report: Callable[[str], None], make_policy: MakePolicy, lets_join: bool = False,
    killed: KilledServer | None = None,
) -> None:  # fmt: skip
    """Be a server until every worker is done or lost. It starts from the weights that the first worker installs.

    Args:
        report: shows the user a line.
        lets_join: whether workers can join and come back in this mode, where shares are leased and the wire lets them.
        killed: go on in place of this one, with all that it had answered.

    Raises:
        Failure: a worker was lost, and the others cannot go on: in ps-sync, or before training.
    """
    config, world = job.config, job.world
    is_open = lets_join and config.shares != "static" and config.wire in OPEN_WIRES
    memory = None
    if is_open and servers_return(config):
        memory = CrashMemory(killed.memory_fd if killed else None)
    numbers = [int(name.removeprefix(_BUCKET)) for name in memory.names() if name.startswith(_BUCKET)] if memory else []
    states = {number: memory.state_of(f"{_BUCKET}{number}") for number in numbers} if memory else {}
    lines = {number: state.plain[0]["lines"] for number, state in states.items() if state.plain} if killed else None
    ledger = Ledger(job.folder, world.rank, lines) if config.record else None
    leases, lease_ledger = _leases(job, memory.state_of("leases") if memory else None, killed is not None)
    load = Load(last_row(job.folder, world.rank) if killed else None)

    def make_bucket(number: int, weights: torch.Tensor) -> Bucket:
        policy = make_policy(world.workers, config)
        return Bucket(
            weights, lambda p: load.time_steps_of(make_optimizer(config, p)), policy,
            ledger.of_bucket(number) if ledger else no_ledger,
            memory.state_of(f"{_BUCKET}{number}") if memory else None, load.queued,
        )  # fmt: skip

    membership, shared = Membership(world.workers, memory.state_of("membership") if memory else None), SharedMemory()
    decode = Compressor(config.compression).decode
    server = Server(make_bucket, decode, membership, leases, load, world.rank, shared, memory)
    if killed:
        for number, state in states.items():
            if state.plain:
                server.install(number, state.tensors()["weights"])
        (wire, store), address = _come_back(job, server, killed), killed.store
        report(f"hvdtrain: rank {world.rank}, a server, was killed and is back, with all that it had answered")
    else:
        store = job.meet()
        # With the server: a worker may call as soon as it has started.
        wire = start(world, store, config.timeout, server, config.wire)
        shared.join(world, store, config.timeout)
        address = store_address(world, store)
    metrics = ServerMetrics(job.folder, world.rank, load)  # now that all have met, the first worker has the folder
    restart = _write_restart_info(job, wire, server, memory) if memory else None
    try:
        with deferred_sigterm():  # the workers get it too, and need this server to save
            there, patience = membership.present, OVER_S
            if not server.is_over:
                monitor = WorkerMonitor(job, wire, address, server, report, is_open, killed is not None)
                try:
                    monitor.until_all_have_ended()
                finally:
                    monitor.close()
                there, patience = monitor.there, config.timeout
            metrics.stop()
            if ledger:
                ledger.close()
            if lease_ledger:
                lease_ledger.close()
            if memory:
                _end_with(wire, server, there, patience)
            else:
                assert store
                wire.leave_together(world, store, config.timeout, there)
    except Failure as problem:
        if memory:  # for which the others would wait
            wire.leave_failed(problem)
        raise
    finally:
        if restart:
            restart.unlink(missing_ok=True)


def _leases(job: Job, saved: SavedState | None, is_back: bool) -> tuple[Leases, LeaseLedger | None]:
    """The first server's shares, and their ledger where there is one."""
    if not job.config.record or job.world.rank != 0:
        return Leases(saved=saved), None
    written = saved.plain["lines"] if saved and saved.plain else 0
    ledger = LeaseLedger(job.folder, written if is_back else None)
    return Leases(ledger.write, saved), ledger


def _come_back(job: Job, server: Server, killed: KilledServer) -> "tuple[Wire, Store | None]":
    """Be reached where the server was that was killed; returns the store of the job too, if this is who has it.

    Raises:
        Failure: it had not begun, or another process is reached there.
    """
    world, timeout = job.world, job.config.timeout
    if not server.own:
        raise Failure(f"rank {world.rank} was killed before training began")
    back = {"rank": world.rank, "lost": round(killed.at, 3), "returned": round(time.time(), 3), "lost_updates": 0}
    with server.saving():
        server.returned = [*server.returned, back]
    if server.shares_memory:
        server.shared.on = True  # who knew the memory of the process that was killed will get to know this one's
    wire = start_again(job.config.wire, server.own, server.others, timeout, server)
    with contextlib.suppress(Failure):  # another process has the port: nobody joins any more
        if world.rank == 0:
            return wire, _serve_store(job, server, killed.store)
        # The first server's store is gone where that was killed at the same time: who joins finds no memory then.
        memory = f"{os.getpid()} {server.shared.file}"
        threading.Thread(target=_tell, args=(killed.store, timeout, world.rank, memory), daemon=True).start()
    return wire, None


def _serve_store(job: Job, server: Server, address: tuple[str, int]) -> "Store":
    """A store with what those need who join."""
    store = serve_store(*address, job.config.timeout)
    for rank in range(job.world.servers):
        store.set(f"wire/{rank}", server.others.get(rank, server.own))
        memory = f"{os.getpid()} {server.shared.file}"
        if rank and (other := read_restart_info(job.folder, rank)):
            memory = f"{other.pid} {other.memory}"
        for name in (
            f"memory/{rank}",
            f"memory/{rank}/opened",
            *([] if server.shares_memory else ["memory/not_shared"]),
        ):
            store.set(name, memory)
    return store


def _tell(store: tuple[str, int], timeout: float, rank: int, memory: str) -> None:
    """Have whoever joins find this server's memory."""
    with contextlib.suppress(Failure, RuntimeError):
        reach_store(*store, timeout).set(f"memory/{rank}", memory)


def _write_restart_info(job: Job, wire: Wire, server: Server, memory: CrashMemory) -> Path:
    """From now on this server can be killed."""
    with server.saving():
        server.own, server.others = wire.endpoint, dict(wire.endpoints)
        server.shares_memory = server.shared.on
    wire.returning = frozenset(range(job.world.servers)) - {job.world.rank}
    return write_restart_info(job.folder, job.world.rank, RestartInfo(os.getpid(), memory.file, server.shared.file))


def _end_with(wire: Wire, server: Server, there: Collection[int], patience: float) -> None:
    """Tell the workers that all have ended, those that are there, and leave."""
    server.end()
    deadline = time.monotonic() + patience
    while not server.have_left().issuperset(there) and time.monotonic() < deadline:
        time.sleep(0.02)
    wire.leave_now()
