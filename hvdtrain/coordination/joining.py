"""How a worker joins a job that runs: it asks the first server for a place, and the others to let it in."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from hvdtrain.config.run_config import RunConfig
from hvdtrain.wire.rendezvous import reach_store
from hvdtrain.wire.wire import Wire, start
from hvdtrain.world.place import World

LONGEST_WAIT_S = 1e6  # until the others begin to train again: they may evaluate, or compile


@dataclass(frozen=True)
class Arrival:
    """A worker that has joined, and is waited for from now on.

    Attributes:
        wire, store: those of the job.
        world: its place.
        incarnation: which life at its rank it is, from 1.
        step: the one of its own that it goes on after.
        sums: how many the workers have had.
        age_s: for how long they have trained since they were together the last time.
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
    """Join the job whose store is there, as soon as its workers train.

    Args:
        ranks: how many the job began with.
        is_local: whether all of them are on one host.

    Raises:
        Failure: it cannot be reached, or is over.
    """
    store = reach_store(host, port, config.timeout)
    is_ring = not config.servers
    world = World("alone", -1, ranks, 0, ranks if is_local else 1, config.servers, joined=-1, elastic=is_ring)
    wire = start(world, store, config.timeout, kind="zmq" if is_ring else config.wire)
    endpoint = wire.endpoint
    place = wire.ask(0, "join", endpoint, os.getpid(), timeout=LONGEST_WAIT_S)
    for server in range(1, config.servers):
        wire.ask(server, "admit", place["member"], endpoint, place["step"], os.getpid())
    world = dataclasses.replace(world, rank=place["rank"], joined=place["member"])
    return Arrival(wire, store, world, *(place[name] for name in ("incarnation", "step", "sums", "age_s", "state")))
