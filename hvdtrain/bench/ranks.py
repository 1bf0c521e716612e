"""What a rank of `hvdtrain bench` runs: one operation, several times, for each size. The last rank prints JSON.

mpirun -np 3 python -m hvdtrain.bench.ranks BACKEND SERVERS REPEATS BYTES[,BYTES…] [MODE [TIMES [OP]]]

MODE says when servers apply a push; TIMES how often a repeat does the operation, which is divided out;
OP is p2p where Gloo is to carry that and not an all-reduce.
"""

import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc

from hvdtrain import modes
from hvdtrain.config.run_config import RunConfig
from hvdtrain.ps import wire
from hvdtrain.ps.exchange import Exchange
from hvdtrain.ps.partition import cut
from hvdtrain.world import horovod
from hvdtrain.world.job import Job
from hvdtrain.world.memory import keep_memory, peak_rss_mb
from hvdtrain.world.network import own_address, use_one_interface
from hvdtrain.world.place import World, read_world
from hvdtrain.world.rendezvous import open_store
from hvdtrain.world.terminal import end_at_once

WARM_UP = 2  # not counted: memory is touched for the first time
UPDATE = RunConfig(mode="ps-async", servers=1, optimizer="sgd", momentum=0.0, lr=0.1)
TIMEOUT_S = UPDATE.timeout
Measured = dict[str, Any]  # of one size: `seconds` of each repeat and, of servers, `server_cpu_s` and `server_mb`


def main() -> None:
    backend, servers, repeats, sizes = sys.argv[1], *map(int, sys.argv[2:4]), list(map(int, sys.argv[4].split(",")))
    world = read_world(servers)
    use_one_interface(world)
    if backend == "rpc":  # as in jobs with servers
        keep_memory()
    torch.set_num_threads(1)
    found = BACKENDS[backend](world, repeats, sizes)
    if world.rank == world.size - 1:
        print(json.dumps(found), flush=True)
    if backend == "rpc":
        end_at_once()


def measure(
    repeats: int, barrier: Callable[[], object], act: Callable[[], object], servers: Sequence[int] = ()
) -> Measured:
    """What it costs to `act`, which all workers begin together and end together.

    Args:
        servers: the ranks that are asked what it cost them, by one of the workers.
    """
    times, cpu = [], 0.0
    for repeat in range(WARM_UP + repeats):
        if repeat == WARM_UP:
            cpu = sum(_ask(servers, time.process_time))
        barrier()
        began = time.perf_counter()
        act()
        barrier()
        times.append(time.perf_counter() - began)
    found: Measured = {"seconds": times[WARM_UP:]}
    if servers:
        cpu = sum(_ask(servers, time.process_time)) - cpu
        found |= {"server_cpu_s": cpu / repeats, "server_mb": sum(_ask(servers, _peak_mb))}
    return found


def _ask(ranks: Sequence[int], what: Callable[[], float]) -> list[float]:
    return [torch_rpc.rpc_sync(f"rank{rank}", what) for rank in ranks]


def _peak_mb() -> float:
    return peak_rss_mb() * 2**20 / 1e6


def horovod_allreduce(world: World, repeats: int, sizes: list[int]) -> list[Measured]:
    """Horovod's all-reduce, in place, over what it uses here."""
    import horovod.torch as hvd

    horovod.join(world)
    found = []
    for size in sizes:
        x = torch.ones(size // 4)
        average = partial(hvd.allreduce_, x, op=hvd.Average, name="bench")
        found.append(measure(repeats, lambda: hvd.allreduce(torch.zeros(1), name="barrier"), average))
    horovod.leave()
    return found


def gloo(world: World, repeats: int, sizes: list[int]) -> list[Measured]:
    """torch.distributed's all-reduce over Gloo, in place, or a message from the first rank to the last and back."""
    store = open_store(world, TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    found = []
    for size in sizes:
        x = torch.ones(size // 4)
        act = partial(_ping_pong, x, world) if sys.argv[7:] == ["p2p"] else partial(dist.all_reduce, x)
        found.append(measure(repeats, dist.barrier, act))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _ping_pong(x: torch.Tensor, world: World) -> None:
    last = world.size - 1
    if world.rank == 0:
        dist.send(x, last)
        dist.recv(x, last)
    elif world.rank == last:
        dist.recv(x, 0)
        dist.send(x, 0)


def join_workers(world: World, store: dist.Store) -> None:
    """The workers' process group, whose barrier begins and ends what is measured; the servers have no part in it."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("workers", store), rank=world.worker, world_size=world.workers
    )


def pushpull(world: World, repeats: int, sizes: list[int]) -> list[Measured]:
    """A gradient out and fresh weights in, as the ps- modes do it, applied with plain SGD."""
    mode, times = sys.argv[5] if len(sys.argv) > 5 else UPDATE.mode, int(sys.argv[6]) if len(sys.argv) > 6 else 1
    if world.is_server:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(replace(UPDATE, mode=mode), world, Path(folder), torch.device("cpu"), threads=1)
            modes.load(mode).serve(job, print)
        return []
    store = open_store(world, TIMEOUT_S)
    wire.start(world, store, TIMEOUT_S)
    join_workers(world, store)
    servers = range(world.servers) if world.rank == world.size - 1 else range(0)
    found = []
    for size in sizes:
        weights, gradient = torch.zeros(size // 4), torch.ones(size // 4)
        pieces = cut([len(weights)], world.servers, UPDATE.bucket_elements)
        if world.is_chief:
            for piece in pieces:
                wire.ask(piece.server, "install", piece.number, weights[piece.start : piece.stop].clone())
        dist.barrier()
        exchange = Exchange(
            world.worker, world.workers, pieces, [len(weights)], weights, "none", TIMEOUT_S, staged=False
        )
        steps = iter(range(1, 10**9))

        def act(exchange: Exchange = exchange, gradient: torch.Tensor = gradient, steps: Iterator[int] = steps) -> None:
            for _ in range(times):
                exchange.begin(next(steps), UPDATE.lr)
                exchange.put(0, gradient)
                exchange.wait_for_all()

        found.append(measure(repeats, dist.barrier, act, servers))
    wire.stop(world, store, TIMEOUT_S)
    return found


def naive(world: World, repeats: int, sizes: list[int]) -> list[Measured]:
    """What one writes first with torch.distributed.rpc: push the whole tensor, then pull the whole tensor."""
    store = open_store(world, TIMEOUT_S)
    torch_rpc.init_rpc(
        f"rank{world.rank}", rank=world.rank, world_size=world.size,
        rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{_address(world, store)}", rpc_timeout=TIMEOUT_S
        ),
    )  # fmt: skip
    found = []
    if not world.is_server:
        join_workers(world, store)
        for size in sizes:
            x = torch.ones(size // 4)
            parts = [x[piece.start : piece.stop] for piece in cut([len(x)], world.servers, len(x))]

            def act(parts: list[torch.Tensor] = parts) -> None:
                torch.futures.wait_all(
                    [torch_rpc.rpc_async(f"rank{s}", _update, args=(p,)) for s, p in enumerate(parts)]
                )
                pulled = [torch_rpc.rpc_async(f"rank{s}", _pull) for s in range(len(parts))]
                for answer, part in zip(pulled, parts, strict=True):
                    part.copy_(answer.wait())

            found.append(measure(repeats, dist.barrier, act))
            dist.barrier()
    torch_rpc.shutdown()
    return found


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


BACKENDS = {"horovod": horovod_allreduce, "gloo": gloo, "rpc": pushpull, "naive-rpc": naive}

if __name__ == "__main__":
    main()
