"""What a server does with its life: it serves until every worker is done or lost."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hvdtrain.config.run_config import OPEN_WIRES, RunConfig
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.join_info import RestartInfo, read_restart_info, servers_return, write_restart_info
from hvdtrain.errors import Failure
from hvdtrain.numerics.compression import Compressor
from hvdtrain.numerics.optimizers import make_exchange_optimizer
from hvdtrain.ps.bucket import Bucket, Policy
from hvdtrain.ps.crash_memory import CrashMemory
from hvdtrain.ps.desk import Desk
from hvdtrain.ps.journal import Journal
from hvdtrain.ps.server_metrics import Load, ServerMetrics, last_row, traced
from hvdtrain.ps.worker_monitor import WorkerMonitor
from hvdtrain.system import trace
from hvdtrain.system.preempt import deferred_sigterm
from hvdtrain.wire.rendezvous import reach_store, serve_store, store_address
from hvdtrain.wire.wire import Wire, start, start_again

if TYPE_CHECKING:
    from torch.distributed import Store


MakePolicy = Callable[[int, RunConfig], Policy]  # given how many workers there are
OVER_S = 3.0  # for how long one that was killed at the end is there for workers that have not heard of that


@dataclass(frozen=True)
class KilledServer:
    """A server that was killed, in whose place this process is."""

    memory_fd: int  # a file descriptor of the memory of ps.crash_memory
    store: tuple[str, int]  # where the store was that all ranks share
    at: float  # in seconds since 1970


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
    is_open = lets_join and config.shares != "equal" and config.wire in OPEN_WIRES
    memory = CrashMemory(killed.memory_fd if killed else None) if is_open and servers_return(config) else None
    desk = _desk(job, make_policy, memory, killed is not None)
    if killed:
        (wire, store), address = _come_back(job, desk, killed), killed.store
        report(f"hvdtrain: rank {world.rank}, a server, was killed and is back, with all that it had answered")
    else:
        store = job.meet()
        # With the desk: a worker may call as soon as it has started.
        wire = start(world, store, config.timeout, desk, config.wire)
        desk.shared.join(world, store, config.timeout)
        address = store_address(world, store)
    metrics = ServerMetrics(job.folder, world.rank, desk.load)  # now that all have met, the first worker has the folder
    restart = _write_restart_info(job, wire, desk, memory) if memory else None
    try:
        with deferred_sigterm():  # the workers get it too, and need this server to save
            present, patience = desk.roster.present, OVER_S
            if not desk.roster.is_over:
                monitor = WorkerMonitor(job, wire, address, desk, report, is_open, killed is not None)
                try:
                    monitor.until_all_have_ended()
                finally:
                    monitor.close()
                present, patience = monitor.present, config.timeout
            metrics.stop()
            if desk.journal:
                desk.journal.close()
            if memory:
                _end_with(wire, desk, present, patience)
            else:
                assert store
                wire.leave_together(world, store, config.timeout, present)
    except Failure as problem:
        if memory:  # for which the others would wait
            wire.leave_now(problem)
        raise
    finally:
        if restart:
            restart.unlink(missing_ok=True)


def _desk(job: Job, make_policy: MakePolicy, memory: CrashMemory | None, recovered: bool) -> Desk:
    """What answers workers, with what the memory has."""
    config, world = job.config, job.world
    load = Load(last_row(job.folder, world.rank) if recovered else None)
    journal = Journal(memory, job.folder if config.record else None, world.rank) if memory or config.record else None

    def make_bucket(number: int, weights: torch.Tensor) -> Bucket:
        return Bucket(
            weights,
            lambda parameters: load.time_steps_of(make_exchange_optimizer(config, parameters, world.workers)),
            make_policy(world.workers, config),
            answers_again=memory is not None,
        )

    decode = None if config.compression == "none" else Compressor(config.compression).decode
    fixed = config.shares == "equal"
    desk = Desk(world.workers, make_bucket, decode, load, journal, fixed_shares=fixed)
    if trace.is_on:
        desk.calls["push"] = traced(desk.push, world.rank, world.workers, load)
    for number in journal.saved_buckets() if journal else ():
        desk.install(number, torch.empty(0))  # which has what was saved
    return desk


def _come_back(job: Job, desk: Desk, killed: KilledServer) -> "tuple[Wire, Store | None]":
    """Be reached where the server was that was killed; returns the store of the job too, if this is who has it.

    Raises:
        Failure: it had not begun, or another process is reached there.
    """
    world, timeout = job.world, job.config.timeout
    if not desk.roster.endpoint:
        raise Failure(f"rank {world.rank} was killed before training began")
    back = {"rank": world.rank, "lost": round(killed.at, 3), "returned": round(time.time(), 3), "lost_updates": 0}
    desk.act(desk.roster, "know", {"returned": [*desk.roster.returned, back]})
    if desk.roster.shares_memory:
        desk.shared.on = True  # who knew the memory of the process that was killed will get to know this one's
    wire = start_again(job.config.wire, desk.roster.endpoint, desk.roster.others, timeout, desk)
    with contextlib.suppress(Failure):  # another process has the port: nobody joins any more
        if world.rank == 0:
            return wire, _serve_store(job, desk, killed.store)
        # The first server's store is gone where that was killed at the same time: who joins finds no memory then.
        memory = f"{os.getpid()} {desk.shared.file}"
        threading.Thread(target=_tell, args=(killed.store, timeout, world.rank, memory), daemon=True).start()
    return wire, None


def _serve_store(job: Job, desk: Desk, address: tuple[str, int]) -> "Store":
    """A store with what those need who join."""
    store = serve_store(*address, job.config.timeout)
    for rank in range(job.world.servers):
        store.set(f"wire/{rank}", desk.roster.others.get(rank, desk.roster.endpoint))
        memory = f"{os.getpid()} {desk.shared.file}"
        if rank and (other := read_restart_info(job.folder, rank)):
            memory = f"{other.pid} {other.memory}"
        names = [f"memory/{rank}", f"memory/{rank}/opened"]
        for name in names if desk.roster.shares_memory else [*names, "memory/not_shared"]:
            store.set(name, memory)
    return store


def _tell(store: tuple[str, int], timeout: float, rank: int, memory: str) -> None:
    """Have whoever joins find this server's memory."""
    with contextlib.suppress(Failure, RuntimeError):
        reach_store(*store, timeout).set(f"memory/{rank}", memory)


def _write_restart_info(job: Job, wire: Wire, desk: Desk, memory: CrashMemory) -> Path:
    """From now on this server can be killed."""
    known = {"endpoint": wire.endpoint, "others": dict(wire.endpoints), "shares_memory": desk.shared.on}
    desk.act(desk.roster, "know", known)
    wire.returning = frozenset(range(job.world.servers)) - {job.world.rank}
    return write_restart_info(job.folder, job.world.rank, RestartInfo(os.getpid(), memory.file, desk.shared.file))


def _end_with(wire: Wire, desk: Desk, present: Collection[int], patience: float) -> None:
    """Tell the workers that all have ended, those that are present, and leave."""
    desk.act(desk.roster, "end")
    deadline = time.monotonic() + patience
    while not desk.roster.have_left.issuperset(present) and time.monotonic() < deadline:
        time.sleep(0.02)
    wire.leave_now()
