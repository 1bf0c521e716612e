"""How a worker joins a job that runs: the first server gives it a place, the others let it in."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistNetworkError, Store

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.world.place import World
from hvdtrain.job.wire.heartbeat import StoreLost, begin_beating
from hvdtrain.job.wire.rendezvous import reach_store
from hvdtrain.job.wire.wire import Wire, start


@dataclass(frozen=True)
class Arrival:
    """A worker that has joined. The others wait for it from now on.

    Attributes:
        wire: the wire of the job.
        store: the store of the job.
        world: the worker's place.
        incarnation: which life at its rank the worker is, from 1.
        step: the worker's step that it goes on after.
        sums: how many sums the workers have had.
        age_s: how many seconds the workers have trained since they last came together.
        state: what they had come to then: see training.loop.
    """

    wire: Wire
    store: Store
    world: World
    incarnation: int
    step: int
    sums: int
    age_s: float
    state: Any


def arrive(config: RunConfig, host: str, port: int, ranks: int, is_local: bool) -> Arrival:
    """Joins a job, as soon as its workers train.

    Args:
        config: the configuration of the run.
        host, port: where the job's store is.
        ranks: how many ranks the job began with.
        is_local: whether all of them are on one host.

    Raises:
        Failure: the job cannot be reached, or is over.
    """
    try:
        return _arrive(config, reach_store(host, port, config.timeout), ranks, is_local)
    except (StoreLost, DistNetworkError):
        raise Failure("the job ended before this worker had joined it") from None


def _arrive(config: RunConfig, store: Store, ranks: int, is_local: bool) -> Arrival:
    is_ring = not config.servers
    local_size = ranks if is_local else 1
    world = World("alone", -1, ranks, 0, local_size, config.servers, joined=-1, elastic=is_ring)
    wire = start(world, store, config.timeout, kind="zmq" if is_ring else config.wire)
    endpoint = wire.endpoint
    place = wire.ask(0, "join", endpoint, os.getpid())
    member = place["member"]
    for server in range(1, config.servers):
        wire.ask(server, "admit", member, endpoint, place["step"], os.getpid())
    begin_beating(store, config.servers + member, config.timeout)
    return Arrival(
        wire,
        store,
        dataclasses.replace(world, rank=place["rank"], joined=member),
        incarnation=place["incarnation"],
        step=place["step"],
        sums=place["sums"],
        age_s=place["age_s"],
        state=place["state"],
    )
