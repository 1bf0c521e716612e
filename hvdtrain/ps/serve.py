"""What a server does with its life: it serves until every worker is done or lost."""

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch
from torch.distributed import Store

from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import Failure
from hvdtrain.numerics.compression import Compressor
from hvdtrain.numerics.optimizers import make_optimizer
from hvdtrain.ps import wire
from hvdtrain.ps.bucket import Bucket, Policy, no_ledger
from hvdtrain.ps.leases import Leases
from hvdtrain.ps.ledger import LeaseLedger, Ledger
from hvdtrain.ps.membership import Membership
from hvdtrain.ps.server import Server
from hvdtrain.ps.server_metrics import Load, ServerMetrics
from hvdtrain.ps.shared import SharedMemory
from hvdtrain.world.job import Job
from hvdtrain.world.place import World
from hvdtrain.world.preempt import deferred_sigterm
from hvdtrain.world.rendezvous import mark_left, open_store

INSTALLED = "installed"  # in the store, once every server has its weights


class MakePolicy(Protocol):
    def __call__(self, workers: int, config: RunConfig) -> Policy: ...


def serve(job: Job, report: Callable[[str], None], make_policy: MakePolicy) -> None:
    """Be a server until every worker is done or lost. It starts from the weights that the first worker installs.

    Args:
        report: shows the user a line.

    Raises:
        Failure: a worker was lost, and the others cannot go on: in ps-sync; before training; or it was the first one,
            which saves the results.
    """
    config, world = job.config, job.world
    ledger = Ledger(job.folder, world.rank) if config.record else None
    lease_ledger = LeaseLedger(job.folder) if config.record and world.rank == 0 else None

    def make_bucket(number: int, weights: torch.Tensor) -> Bucket:
        policy = make_policy(world.workers, config)
        return Bucket(
            weights, lambda p: load.time_steps_of(make_optimizer(config, p)), policy,
            ledger.of_bucket(number) if ledger else no_ledger,
        )  # fmt: skip

    leases, load = Leases(lease_ledger.write) if lease_ledger else Leases(), Load()
    decode = Compressor(config.compression).decode
    shared = SharedMemory()
    server = Server(make_bucket, decode, Membership(world.workers), leases, load, world.rank, shared)
    store = open_store(world, config.timeout)
    # With the server: a worker may call as soon as it has started.
    wire.start(world, store, config.timeout, server, config.wire)
    shared.join(world, store, config.timeout)
    metrics = ServerMetrics(job.folder, world.rank, load)  # now that all have met, the first worker has the folder
    ended: SimpleQueue[tuple[int, str]] = SimpleQueue()
    for rank in range(world.servers, world.size):
        wire.watch(rank, config.timeout, partial(lambda rank, why: ended.put((rank, why)), rank))
    with deferred_sigterm():  # the workers get it too, and need this server to save
        for _ in range(world.workers):
            rank, why = ended.get()
            if why:
                _lose(rank, why, world, store, server)
                if world.rank == 0:
                    report(f"hvdtrain: rank {rank} is lost, and the others go on without it: {why}")
        metrics.stop()
        if ledger:
            ledger.close()
        if lease_ledger:
            lease_ledger.close()
        wire.stop(world, store, config.timeout)


def _lose(rank: int, why: str, world: World, store: Store, server: Server) -> None:
    """Go on without a worker. Failure where that cannot be."""
    worker = rank - world.servers
    if worker == 0:
        raise Failure(f"rank {rank}, the first worker, is lost: {why}")
    if not store.check([INSTALLED]):
        raise Failure(f"rank {rank} was lost before training began: {why}")
    try:
        server.lose(worker)
    except Failure as reason:
        raise Failure(f"rank {rank} is lost, and {reason}: {why}") from None
    if world.rank == 0:
        mark_left(rank, store)
