"""What a rank of `hvdtrain bench` does in its turns: one operation, with a vector of the size that it is told."""

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

from hvdtrain import modes
from hvdtrain.buckets.partition import cut
from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.job import Job
from hvdtrain.ps.exchange import PushExchange
from hvdtrain.system.memory import keep_memory
from hvdtrain.wire import horovod
from hvdtrain.wire.rendezvous import open_store
from hvdtrain.wire.shared import SharedMemory
from hvdtrain.wire.wire import WIRES, Wire, start
from hvdtrain.world.network import use_one_interface
from hvdtrain.world.place import World, read_world

UPDATE = RunConfig(mode="ps-async", servers=1, optimizer="sgd", momentum=0.0, lr=0.1)
TIMEOUT_S = UPDATE.timeout  # of meeting
TURNS_S = 86400.0  # while others have their turn, a rank is stopped, and cannot say that it lives
Act = Callable[[], object]


def take_part(backend: str, words: Sequence[str], turns: TextIO) -> None:
    """Do what the lines of `turns` say, a size in bytes each, until they end. Servers serve for as long.

    Every line is answered when all workers have done it: by the last one with `seconds` and, of all servers
    together, `server_cpu_s` and `server_mb`, their largest memory so far.
    """
    servers, times = int(words[0]), int(words[2])
    update = replace(UPDATE, mode=words[1], bucket_mb=float(words[3]))
    world = read_world(servers)
    use_one_interface(world)
    if backend in WIRES:  # as in jobs with servers
        keep_memory()
    torch.set_num_threads(1)

    def say(what: object) -> None:
        turns.write(f"{what}\n")
        turns.flush()

    if world.is_server:
        say("server")
        with tempfile.TemporaryDirectory() as folder:
            served = replace(update, wire=backend, timeout=TURNS_S)
            job = Job(served, world, Path(folder), torch.device("cpu"), threads=1)
            modes.load(served.mode).serve(job, print)  # to the end
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
        prepare: Callable[[int], Act] = partial(pushpull, world, wire, shared, times, update.bucket_elements)
    else:
        prepare = partial(allreduce, backend)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("workers", store), rank=world.worker, world_size=world.workers
    )
    dist.barrier()
    say("worker")
    measures = world.rank == world.size - 1
    asked = wire if measures else None
    prepared = 0
    act: Act = dist.barrier
    for line in turns:
        if (size := int(line)) != prepared:
            act = dist.barrier  # lets go of the vector
            prepared, act = size, prepare(size)
        measured = _measure(act, asked, servers)
        say(json.dumps(measured if measures else None))


def _measure(act: Act, wire: Wire | None, servers: int) -> dict[str, float]:
    """What it costs to act, which all workers begin together and end together; of servers, where there is a wire to ask
    them, see ps.server_metrics.Load.cost.

    Once before is not counted: while others had their turn, they had the processors' caches.
    """
    ask = [partial(wire.ask, rank, "cost") for rank in range(servers)] if wire else []
    dist.barrier()
    act()
    dist.barrier()
    before = [cost() for cost in ask]
    dist.barrier()
    began = time.perf_counter()
    act()
    dist.barrier()
    measured = {"seconds": time.perf_counter() - began}
    if after := [cost() for cost in ask]:
        cpu_s, before_s = (sum(server["cpu_s"] for server in costs) for costs in (after, before))
        megabytes = sum(server["peak_rss_mb"] for server in after) * 2**20 / 1e6
        measured |= {"server_cpu_s": cpu_s - before_s, "server_mb": megabytes}
    return measured


def allreduce(backend: str, size: int) -> Act:
    """An all-reduce of so many bytes, in place: Horovod's, over what it uses here, or torch.distributed's over Gloo."""
    if backend == "gloo":
        return partial(dist.all_reduce, torch.ones(size // 4))
    import horovod.torch as hvd

    return partial(hvd.allreduce_, torch.ones(size // 4), op=hvd.Average, name="bench")


def pushpull(world: World, wire: Wire, shared: SharedMemory, times: int, bucket: int, size: int) -> Act:
    """A gradient of so many bytes out and fresh weights in, as the ps- modes do it.

    Args:
        times: how often one turn does it.
        bucket: elements of the vector that travel as one message to a server.
    """
    weights, gradient = torch.zeros(size // 4), torch.ones(size // 4)
    pieces = cut([len(weights)], world.servers, bucket)
    if world.is_chief:
        for piece in pieces:
            wire.ask(piece.server, "install", piece.number, weights[piece.start : piece.stop].clone())
    exchange = PushExchange(
        wire, world.worker, world.workers, pieces, [len(weights)], weights, "none", staged=False, shared=shared,
    )  # fmt: skip
    steps = count(1)

    def act() -> None:
        for _ in range(times):
            exchange.begin_step(next(steps), UPDATE.lr)
            exchange.bucketer.put(0, gradient)
            exchange.wait_for_all()

    return act
