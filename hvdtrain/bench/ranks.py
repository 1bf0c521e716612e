"""What a rank of `hvdtrain bench` does in its turns: one operation, with a vector of the size that it is told."""

import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn, TextIO

import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc

from hvdtrain import modes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.ps import wire
from hvdtrain.ps.exchange import Exchange
from hvdtrain.ps.partition import cut
from hvdtrain.ps.shared import SharedMemory
from hvdtrain.world import horovod
from hvdtrain.world.job import Job
from hvdtrain.world.memory import keep_memory
from hvdtrain.world.network import own_address, use_one_interface
from hvdtrain.world.place import World, read_world
from hvdtrain.world.rendezvous import open_store

UPDATE = RunConfig(mode="ps-async", servers=1, optimizer="sgd", momentum=0.0, lr=0.1)
TIMEOUT_S = UPDATE.timeout  # of meeting
TURNS_S = 86400.0  # while others have their turn, a rank is stopped, and cannot say that it lives
Act = Callable[[], object]
Prepare = Callable[[int], Act]  # given the bytes of the vector


@dataclass(frozen=True)
class Rank:
    """
    Attributes:
        times: how often one turn does the operation.
        bucket: elements of the vector that travel as one message to a server.
    """

    world: World
    store: dist.Store
    times: int
    bucket: int


def take_part(backend: str, words: Sequence[str], turns: TextIO) -> None:
    """Do what the lines of `turns` say, a size in bytes each, until they end. Servers serve for as long.

    Every line is answered when all workers have done it: by the last one with `seconds` and, of all servers
    together, `server_cpu_s` and `server_mb`, their largest memory so far.
    """
    servers, times = int(words[0]), int(words[2])
    update = replace(UPDATE, mode=words[1], bucket_mb=float(words[3]))
    world = read_world(servers)
    use_one_interface(world)
    if backend in wire.WIRES:  # as in jobs with servers
        keep_memory()
    torch.set_num_threads(1)

    def say(what: object) -> None:
        turns.write(f"{what}\n")
        turns.flush()

    if world.is_server:
        say("server")
        if backend in wire.WIRES:
            _serve(world, replace(update, wire=backend, timeout=TURNS_S))
    if backend == "horovod" and world.starts_horovod:
        horovod.join(world)
    store = open_store(world, TIMEOUT_S)
    if backend == "horovod" and not world.starts_horovod:
        horovod.join(world, store)
    prepare = BACKENDS[backend](Rank(world, store, times, update.bucket_elements))
    if world.is_server:
        turns.read()
        return
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("workers", store), rank=world.worker, world_size=world.workers
    )
    dist.barrier()
    say("worker")
    measures = world.rank == world.size - 1
    asked = range(servers if measures and backend in wire.WIRES else 0)
    prepared = 0
    act: Act = dist.barrier
    for line in turns:
        if (size := int(line)) != prepared:
            act = dist.barrier  # lets go of the vector
            prepared, act = size, prepare(size)
        found = _measure(act, asked)
        say(json.dumps(found if measures else None))


def _measure(act: Act, servers: Sequence[int]) -> dict[str, float]:
    """What it costs to act, which all workers begin together and end together.

    Once before is not counted: while others had their turn, they had the processors' caches.
    """
    _act_together(act)
    cpu_s = _of_servers(servers, "cpu_s")
    found = {"seconds": _act_together(act)}
    if servers:
        cpu_s = _of_servers(servers, "cpu_s") - cpu_s
        found |= {"server_cpu_s": cpu_s, "server_mb": _of_servers(servers, "peak_rss_mb") * 2**20 / 1e6}
    return found


def _act_together(act: Act) -> float:
    """The seconds that it took, from when all workers were there until all were done."""
    dist.barrier()
    began = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - began


def _of_servers(servers: Sequence[int], cost: str) -> float:
    """What it has cost all of them together up to now: see ps.server_metrics.Load.cost."""
    return sum(wire.ask(rank, "cost")[cost] for rank in servers)


def horovod_allreduce(rank: Rank) -> Prepare:
    """Horovod's all-reduce, in place, over what it uses here."""
    import horovod.torch as hvd

    return lambda size: partial(hvd.allreduce_, torch.ones(size // 4), op=hvd.Average, name="bench")


def gloo(rank: Rank) -> Prepare:
    """torch.distributed's all-reduce over Gloo, in place."""
    return lambda size: partial(dist.all_reduce, torch.ones(size // 4))


def _serve(world: World, config: RunConfig) -> NoReturn:
    """Be one of hvdtrain's servers, which apply pushes with plain SGD, to the end."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(config, world, Path(folder), torch.device("cpu"), threads=1)
        modes.load(config.mode).serve(job, print)
    sys.exit("hvdtrain: its workers have left")


def pushpull(kind: str, rank: Rank) -> Prepare:
    """A gradient out and fresh weights in, as the ps- modes do it over that wire."""
    world = rank.world
    wire.start(world, rank.store, TURNS_S, kind=kind)
    shared = SharedMemory()
    shared.join(world, rank.store, TURNS_S)

    def prepare(size: int) -> Act:
        weights, gradient = torch.zeros(size // 4), torch.ones(size // 4)
        pieces = cut([len(weights)], world.servers, rank.bucket)
        if world.is_chief:
            for piece in pieces:
                wire.ask(piece.server, "install", piece.number, weights[piece.start : piece.stop].clone())
        exchange = Exchange(
            world.worker,
            world.workers,
            pieces,
            [len(weights)],
            weights,
            "none",
            TURNS_S,
            staged=False,
            shared=shared,
        )
        steps = count(1)

        def act() -> None:
            for _ in range(rank.times):
                exchange.begin(next(steps), UPDATE.lr)
                exchange.put(0, gradient)
                exchange.wait_for_all()

        return act

    return prepare


def naive(rank: Rank) -> Prepare:
    """What one writes first with torch.distributed.rpc: push the whole tensor, then pull the whole tensor."""
    world = rank.world
    torch_rpc.init_rpc(
        f"rank{world.rank}", rank=world.rank, world_size=world.size,
        rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{_address(world, rank.store)}", rpc_timeout=TURNS_S
        ),
    )  # fmt: skip

    def prepare(size: int) -> Act:
        x = torch.ones(size // 4)
        parts = [x[piece.start : piece.stop] for piece in cut([len(x)], world.servers, len(x))]

        def act() -> None:
            torch.futures.wait_all([torch_rpc.rpc_async(f"rank{s}", _update, args=(p,)) for s, p in enumerate(parts)])
            pulled = [torch_rpc.rpc_async(f"rank{s}", _pull) for s in range(len(parts))]
            for answer, part in zip(pulled, parts, strict=True):
                part.copy_(answer.wait())

        return act

    return prepare


_weights: torch.Tensor | None = None


def _update(gradient: torch.Tensor) -> None:
    global _weights
    if _weights is None or _weights.shape != gradient.shape:
        _weights = torch.zeros_like(gradient)
    _weights.sub_(gradient, alpha=UPDATE.lr)


def _pull() -> torch.Tensor:
    assert _weights is not None
    return _weights


def _address(world: World, store: dist.Store) -> str:
    if world.rank == 0:
        address = own_address(world)
        with socket.create_server((address, 0)) as free:
            store.set("naive", f"{address}:{free.getsockname()[1]}")
    return store.get("naive").decode()


BACKENDS: dict[str, Callable[[Rank], Prepare]] = {
    "horovod": horovod_allreduce, "gloo": gloo, "naive-rpc": naive,
    **{kind: partial(pushpull, kind) for kind in wire.WIRES},
}  # fmt: skip
