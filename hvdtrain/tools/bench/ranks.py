"""The ranks of `hvdtrain bench`: one operation in each turn, with a vector of a given size."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from hvdtrain.base import modes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.system.memory import keep_memory
from hvdtrain.base.world.network import use_one_interface
from hvdtrain.base.world.place import World, read_world
from hvdtrain.job.buckets.partition import cut
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.ps.push_exchange import PushExchange
from hvdtrain.job.wire import horovod
from hvdtrain.job.wire.rendezvous import open_store
from hvdtrain.job.wire.shared import SharedMemory
from hvdtrain.job.wire.wire import WIRES, Wire, start

UPDATE = RunConfig(mode="ps-async", servers=1, optimizer="sgd", momentum=0.0, lr=0.1)
TIMEOUT_S = UPDATE.timeout  # for the rendezvous
# Timeout of a turn. While other backends have their turn, a rank is stopped, and sends no sign of
# life.
TURNS_S = 86400.0
Operation = Callable[[], object]


def take_part(backend: str, arguments: Sequence[str], turns: TextIO) -> None:
    """Joins the backend's job, and does the operation once for each line of `turns`.

    A line has the size of the vector in bytes. Each worker answers it with a line when all workers
    have done the operation: the last worker with `seconds` and, over all servers, `server_cpu_s`
    and `server_mb`, their peak memory in MiB; the others with null. Servers serve until the lines
    end.

    Args:
        backend: One of command.CARRIERS.
        arguments: The number of servers, the mode, operations of a turn, and MiB of a bucket.
        turns: The connection to the guard; see turns.
    """
    servers = int(arguments[0])
    times = int(arguments[2])
    update = replace(UPDATE, mode=arguments[1], bucket_mb=float(arguments[3]))
    world = read_world(servers)
    use_one_interface(world)
    keep_memory()  # as ranks of jobs do
    torch.set_num_threads(1)

    def say(what: object) -> None:
        turns.write(f"{what}\n")
        turns.flush()

    if world.is_server:
        say("server")
        with tempfile.TemporaryDirectory() as folder:
            served = replace(update, wire=backend, timeout=TURNS_S)
            job = Job(served, world, Path(folder), torch.device("cpu"), threads=1)
            modes.load(served.mode).serve(job, print)
        sys.exit("hvdtrain: its workers have left")
    if backend == "horovod" and world.starts_horovod:
        horovod.join(world)
    store = open_store(world, TIMEOUT_S)
    if backend == "horovod" and not world.starts_horovod:
        horovod.join(world, store)
    wire = start(world, store, TURNS_S, kind=backend) if backend in WIRES else None
    if wire:
        shared = SharedMemory()
        shared.join(world, store, TURNS_S)
        prepare: Callable[[int], Operation] = partial(
            pushpull, world, wire, shared, times, update.bucket_elements
        )
    else:
        prepare = partial(allreduce, backend)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("workers", store),
        rank=world.worker,
        world_size=world.workers,
    )
    dist.barrier()
    say("worker")
    measures = world.rank == world.size - 1
    measured_wire = wire if measures else None
    prepared = 0
    operation: Operation = dist.barrier
    for line in turns:
        size = int(line)
        if size != prepared:
            operation = dist.barrier  # frees the old vector before the new one is made
            operation = prepare(size)
            prepared = size
        measured = _measure(operation, measured_wire, servers)
        say(json.dumps(measured if measures else None))


def _measure(operation: Operation, wire: Wire | None, servers: int) -> dict[str, float]:
    """Times an operation that all workers begin and end together.

    It is done once before, uncounted: the processors' caches have other backends' data.

    Args:
        operation: The operation.
        wire: Asks servers for their costs (ps.server_metrics.ServerLoad.cost); None for no servers.
        servers: The number of servers.
    """
    dist.barrier()
    operation()
    dist.barrier()
    before = _server_costs(wire, servers)
    dist.barrier()
    began = time.perf_counter()
    operation()
    dist.barrier()
    measured = {"seconds": time.perf_counter() - began}
    after = _server_costs(wire, servers)
    if after:
        before_s = sum(cost["cpu_s"] for cost in before)
        after_s = sum(cost["cpu_s"] for cost in after)
        measured["server_cpu_s"] = after_s - before_s
        measured["server_mb"] = sum(cost["peak_rss_mb"] for cost in after)
    return measured


def _server_costs(wire: Wire | None, servers: int) -> list[dict[str, float]]:
    """Asks each server for its costs so far; returns none without a wire."""
    if not wire:
        return []
    return [wire.ask(rank, "cost") for rank in range(servers)]


def allreduce(backend: str, size: int) -> Operation:
    """Returns an all-reduce of `size` bytes in place, by Horovod or by torch.distributed over Gloo.

    Horovod uses whatever it is built with here.
    """
    if backend == "gloo":
        return partial(dist.all_reduce, torch.ones(size // 4))
    import horovod.torch as hvd

    return partial(hvd.allreduce_, torch.ones(size // 4), op=hvd.Average, name="bench")


def pushpull(
    world: World,
    wire: Wire,
    shared: SharedMemory,
    times: int,
    bucket_elements: int,
    size: int,
) -> Operation:
    """Returns a push of a gradient and a pull of fresh weights, as the ps- modes do it.

    Args:
        world: The place of this worker.
        wire: The wire to the servers.
        shared: The shared memory with servers on this host.
        times: Operations of one turn.
        bucket_elements: Elements of the vector that travel as one message to a server, at most.
        size: Bytes of the vector.
    """
    weights = torch.zeros(size // 4)
    gradient = torch.ones(size // 4)
    pieces = cut([len(weights)], world.servers, bucket_elements)
    if world.is_chief:
        for piece in pieces:
            initial = weights[piece.start : piece.stop].clone()
            wire.ask(piece.server, "install", piece.number, initial)
    exchange = PushExchange(
        wire,
        world.worker,
        world.workers,
        pieces,
        [len(weights)],
        weights,
        "none",
        staged=False,
        shared=shared,
    )
    steps = count(1)

    def push_and_pull() -> None:
        for _ in range(times):
            exchange.begin_step(next(steps), UPDATE.lr)
            exchange.bucketer.put(0, gradient)
            exchange.wait_for_all()

    return push_and_pull
