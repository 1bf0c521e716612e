"""A server's life: it serves until every worker is done or lost."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.base.config.run_config import OPEN_WIRES, RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.compression import Compressor
from hvdtrain.base.numerics.optimizers import make_exchange_optimizer
from hvdtrain.base.system import trace
from hvdtrain.base.system.preempt import deferred_sigterm, termination_requested
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.ps.bucket import Bucket
from hvdtrain.job.ps.crash_memory import CrashMemory
from hvdtrain.job.ps.journal import Journal
from hvdtrain.job.ps.policy import Policy
from hvdtrain.job.ps.server import Server
from hvdtrain.job.ps.server_metrics import ServerLoad, ServerMetrics, last_row, traced
from hvdtrain.job.ps.worker_monitor import WorkerMonitor
from hvdtrain.job.wire.rendezvous import reach_store, serve_store, store_address
from hvdtrain.job.wire.shared import SharedMemory
from hvdtrain.job.wire.wire import Wire, start, start_again
from hvdtrain.runs.join_info import (
    RestartInfo,
    read_restart_info,
    servers_return,
    write_restart_info,
)

if TYPE_CHECKING:
    from torch.distributed import Store


MakePolicy = Callable[[int, RunConfig], Policy]  # given the number of workers
OVER_S = 3.0  # how long a server that was killed at the end stays for workers that have not heard
LEAVING_S = 0.02  # between two looks at who has left


@dataclass(frozen=True)
class KilledServer:
    """A server that was killed, in whose place this process is.

    Attributes:
        memory_fd: a file descriptor of its crash memory.
        store: the host and port of the store that all ranks share.
        at: when it was killed, in seconds since 1970.
    """

    memory_fd: int
    store: tuple[str, int]
    at: float


def serve(
    job: Job,
    report: Callable[[str], None],
    make_policy: MakePolicy,
    lets_join: bool = False,
    killed: KilledServer | None = None,
) -> None:
    """Serves until every worker is done or lost, from the weights that the first worker installs.

    Args:
        job: the job as this rank knows it.
        report: shows the user a line.
        make_policy: makes a bucket's policy.
        lets_join: whether workers can join and come back in this mode, where shares are leased and
            the wire lets them.
        killed: the server that this one replaces, with all that it had answered.

    Raises:
        Failure: a worker was lost, and the others cannot go on: in ps-sync, or before training.
    """
    config = job.config
    world = job.world
    is_open = lets_join and config.shares != "equal" and config.wire in OPEN_WIRES
    memory = None
    if is_open and servers_return(config):
        memory = CrashMemory(killed.memory_fd if killed else None)
    load = ServerLoad(last_row(job.folder, world.rank) if killed else None)
    journal = Journal(memory, job.folder if config.record else None, world.rank)
    server = make_server(config, world, make_policy, load, journal)
    store: Store | None
    if killed:
        wire, store = _come_back(job, server, killed)
        address = killed.store
        report(
            f"hvdtrain: rank {world.rank}, a server, was killed and is back, with all that it had "
            "answered"
        )
    else:
        store = job.meet()
        # With the server, since a worker may call as soon as the wire is there.
        wire = start(world, store, config.timeout, server, config.wire)
        if world.rank and not memory:
            wire.end_when_silent(world, store, config.timeout)
        server.shared.join(world, store, config.timeout)
        address = store_address(world, store)
    # All ranks have met: the first worker has made the folder.
    metrics = ServerMetrics(job.folder, world.rank, server.load)
    restart_info = _write_restart_info(job, wire, server, memory) if memory else None
    try:
        # Workers get the signal too, or are told of it, and need this server to save.
        with deferred_sigterm():
            wire.requests.asked_to_leave = termination_requested
            present = server.roster.present
            patience = OVER_S
            if not server.roster.is_over:
                recovered = killed is not None
                monitor = WorkerMonitor(job, wire, address, server, report, is_open, recovered)
                try:
                    monitor.until_all_have_ended()
                finally:
                    monitor.close()
                present = monitor.present
                patience = config.timeout
            metrics.stop()
            server.journal.close()
            if memory:
                _leave_without_store(wire, server, present, patience)
            else:
                assert store
                wire.leave_together(world, store, config.timeout, present)
    except Failure as problem:
        if memory:
            wire.leave_now(problem)  # the others would wait for this server to come back
        raise
    finally:
        if restart_info:
            restart_info.unlink(missing_ok=True)


def make_server(
    config: RunConfig, world: World, make_policy: MakePolicy, load: ServerLoad, journal: Journal
) -> Server:
    """Makes the server, with all that its journal's crash memory has.

    Args:
        config: the configuration of the run.
        world: where the server is.
        make_policy: makes a bucket's policy.
        load: counts what the server does.
        journal: writes down what the server does.
    """

    def make_bucket(
        number: int, weights: torch.Tensor, optimizer: Mapping[str, Any] | None = None
    ) -> Bucket:
        of_job = dataclasses.replace(config, **optimizer or {})

        def make_optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
            return load.time_steps_of(make_exchange_optimizer(of_job, parameters, world.workers))

        policy = make_policy(world.workers, config)
        answers_again = journal.memory is not None
        return Bucket(shared.keep(weights), make_optimizer, policy, answers_again, shared)

    shared = SharedMemory()
    decode = None
    if config.compression != "none":
        decode = Compressor(config.compression).decode
    fixed_shares = config.shares == "equal"
    server = Server(world.workers, make_bucket, decode, load, journal, shared, fixed_shares)
    if trace.is_on:
        server.calls["push"] = traced(server.push, world.rank, world.workers, load)
    # Of a server that was killed, whose peers will get to know this process's memory.
    shared.on = server.roster.shares_memory
    for number in journal.saved_buckets():
        server.install(number, torch.empty(0))  # the journal restores what was saved
    return server


def _come_back(job: Job, server: Server, killed: KilledServer) -> "tuple[Wire, Store | None]":
    """Listens where the killed server did.

    Returns:
        The wire, and the job's store where this server serves it.

    Raises:
        Failure: training had not begun, or another process listens there.
    """
    world = job.world
    timeout = job.config.timeout
    roster = server.roster
    if not roster.endpoint:
        raise Failure(f"rank {world.rank} was killed before training began")
    returned = {
        "rank": world.rank,
        "lost": round(killed.at, 3),
        "returned": round(time.time(), 3),
        "lost_updates": 0,
    }
    server.handle(roster, roster.know, {"returned": [*roster.returned, returned]})
    wire = start_again(job.config.wire, roster.endpoint, roster.others, timeout, server)
    with contextlib.suppress(Failure):  # another process has the port: nobody joins any more
        if world.rank == 0:
            return wire, _serve_store(job, server, killed.store)
        # Where the first server was killed at the same time, its store is gone: a worker that joins
        # finds no memory then.
        memory = f"{os.getpid()} {server.shared.file}"
        arguments = (killed.store, timeout, world.rank, memory)
        threading.Thread(target=_publish_memory, args=arguments, daemon=True).start()
    return wire, None


def _serve_store(job: Job, server: Server, address: tuple[str, int]) -> "Store":
    """Serves a new store, with what workers that join look for."""
    store = serve_store(*address, job.config.timeout)
    roster = server.roster
    for rank in range(job.world.servers):
        store.set(f"wire/{rank}", roster.others.get(rank, roster.endpoint))
        memory = f"{os.getpid()} {server.shared.file}"
        other = read_restart_info(job.folder, rank) if rank else None
        if other:
            memory = f"{other.pid} {other.memory}"
        names = [f"memory/{rank}", f"memory/{rank}/opened"]
        if not roster.shares_memory:
            names.append("memory/not_shared")
        for name in names:
            store.set(name, memory)
    return store


def _publish_memory(store: tuple[str, int], timeout: float, rank: int, memory: str) -> None:
    """Lets workers that join find this server's shared memory."""
    with contextlib.suppress(Failure, RuntimeError):
        reach_store(*store, timeout).set(f"memory/{rank}", memory)


def _write_restart_info(job: Job, wire: Wire, server: Server, memory: CrashMemory) -> Path:
    """Writes what a server in place of this one needs. From now on this one can be killed."""
    known = {
        "endpoint": wire.endpoint,
        "others": dict(wire.endpoints),
        "shares_memory": server.shared.on,
    }
    server.handle(server.roster, server.roster.know, known)
    wire.returning = frozenset(range(job.world.servers)) - {job.world.rank}
    info = RestartInfo(os.getpid(), memory.file, server.shared.file)
    return write_restart_info(job.folder, job.world.rank, info)


def _leave_without_store(
    wire: Wire, server: Server, present: Collection[int], patience: float
) -> None:
    """Tells the present workers that all have ended, and leaves.

    Args:
        wire: the wire to leave.
        server: this server.
        present: the workers that are told.
        patience: how many seconds to wait for them.
    """
    roster = server.roster
    server.handle(roster, roster.end)
    deadline = time.monotonic() + patience
    while not roster.have_left.issuperset(present) and time.monotonic() < deadline:
        time.sleep(LEAVING_S)
    wire.leave_now()
