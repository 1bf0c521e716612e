"""What a server does with its life: it serves until every worker is done or lost."""

from collections.abc import Callable
from typing import Protocol

import torch

from hvdtrain.config.run_config import OPEN_WIRES, RunConfig
from hvdtrain.numerics.compression import Compressor
from hvdtrain.numerics.optimizers import make_optimizer
from hvdtrain.ps import wire
from hvdtrain.ps.attendance import Attendance
from hvdtrain.ps.bucket import Bucket, Policy, no_ledger
from hvdtrain.ps.leases import Leases
from hvdtrain.ps.ledger import LeaseLedger, Ledger
from hvdtrain.ps.membership import Membership
from hvdtrain.ps.server import Server
from hvdtrain.ps.server_metrics import Load, ServerMetrics
from hvdtrain.ps.shared import SharedMemory
from hvdtrain.world.job import Job
from hvdtrain.world.preempt import deferred_sigterm
from hvdtrain.world.rendezvous import open_store


class MakePolicy(Protocol):
    def __call__(self, workers: int, config: RunConfig) -> Policy: ...


def serve(job: Job, report: Callable[[str], None], make_policy: MakePolicy, lets_join: bool = False) -> None:
    """Be a server until every worker is done or lost. It starts from the weights that the first worker installs.

    Args:
        report: shows the user a line.
        lets_join: whether workers can join and come back in this mode, where shares are leased and the wire lets them.

    Raises:
        Failure: a worker was lost, and the others cannot go on: in ps-sync, or before training.
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
    is_open = lets_join and config.shares != "static" and config.wire in OPEN_WIRES
    attendance = Attendance(job, store, server, report, is_open)
    with deferred_sigterm():  # the workers get it too, and need this server to save
        attendance.until_all_have_ended()
        metrics.stop()
        if ledger:
            ledger.close()
        if lease_ledger:
            lease_ledger.close()
        wire.stop(world, store, config.timeout, attendance.there)
