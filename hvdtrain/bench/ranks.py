"""What a rank of `hvdtrain bench` runs: one operation, several times, for each size. The last rank prints JSON.

mpirun -np 3 python -m hvdtrain.bench.ranks BACKEND SERVERS REPEATS BYTES[,BYTES…]
"""

import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc

from hvdtrain.config.run_config import RunConfig
from hvdtrain.modes import ps_async
from hvdtrain.ps import rpc
from hvdtrain.ps.exchange import Exchange
from hvdtrain.ps.partition import cut
from hvdtrain.world import horovod
from hvdtrain.world.job import Job
from hvdtrain.world.memory import keep_memory
from hvdtrain.world.network import use_one_interface
from hvdtrain.world.place import World, read_world
from hvdtrain.world.rendezvous import open_store

WARM_UP = 2  # not counted: memory is touched for the first time
UPDATE = RunConfig(mode="ps-async", servers=1, optimizer="sgd", momentum=0.0, lr=0.1)
TIMEOUT_S = UPDATE.timeout


def main() -> None:
    backend, servers, repeats, sizes = sys.argv[1], *map(int, sys.argv[2:4]), list(map(int, sys.argv[4].split(",")))
    world = read_world(servers)
    use_one_interface(world)
    if backend != "naive-rpc":  # as in every process that trains
        keep_memory()
    torch.set_num_threads(1)
    seconds = BACKENDS[backend](world, repeats, sizes)
    if world.rank == world.size - 1:
        print(json.dumps(seconds), flush=True)


def measure(repeats: int, barrier: Callable[[], object], act: Callable[[], object]) -> list[float]:
    """Seconds that this rank takes for `act`, which all workers begin together and end together."""
    times = []
    for _ in range(WARM_UP + repeats):
        barrier()
        began = time.perf_counter()
        act()
        barrier()
        times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def horovod_allreduce(world: World, repeats: int, sizes: list[int]) -> list[list[float]]:
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


def gloo(world: World, repeats: int, sizes: list[int]) -> list[list[float]]:
    """torch.distributed's all-reduce over Gloo, in place."""
    store = open_store(world, TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    found = []
    for size in sizes:
        x = torch.ones(size // 4)
        found.append(measure(repeats, dist.barrier, partial(dist.all_reduce, x)))
    dist.barrier()
    dist.destroy_process_group()
    return found


def join_workers(world: World, store: dist.Store) -> None:
    """The workers' process group, whose barrier begins and ends what is measured; the servers have no part in it."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("workers", store), rank=world.worker, world_size=world.workers
    )


def pushpull(world: World, repeats: int, sizes: list[int]) -> list[list[float]]:
    """A gradient out and fresh weights in, as the ps- modes do it: applied with plain SGD as it comes."""
    if world.is_server:
        with tempfile.TemporaryDirectory() as folder:
            ps_async.serve(Job(UPDATE, world, Path(folder), torch.device("cpu"), threads=1), print)
        return []
    store = open_store(world, TIMEOUT_S)
    rpc.start(world, store, TIMEOUT_S)
    join_workers(world, store)
    found = []
    for size in sizes:
        weights, gradient = torch.zeros(size // 4), torch.ones(size // 4)
        pieces = cut([len(weights)], world.servers, UPDATE.bucket_elements)
        if world.is_chief:
            for piece in pieces:
                rpc.ask(piece.server, "install", piece.number, weights[piece.start : piece.stop].clone())
        dist.barrier()
        exchange = Exchange(world.worker, pieces, [len(weights)], weights, "none", TIMEOUT_S, staged=False)
        rpc.set_endpoint(exchange)
        steps = iter(range(1, 10**9))

        def act(exchange: Exchange = exchange, gradient: torch.Tensor = gradient, steps: Iterator[int] = steps) -> None:
            exchange.begin(next(steps), UPDATE.lr)
            exchange.put(0, gradient)
            exchange.wait_for_all()

        found.append(measure(repeats, dist.barrier, act))
    rpc.stop(world, store, TIMEOUT_S)
    return found


def naive(world: World, repeats: int, sizes: list[int]) -> list[list[float]]:
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
        with socket.create_server(("127.0.0.1", 0)) as free:
            store.set("naive", f"127.0.0.1:{free.getsockname()[1]}")
    return store.get("naive").decode()


BACKENDS = {"horovod": horovod_allreduce, "gloo": gloo, "rpc": pushpull, "naive-rpc": naive}

if __name__ == "__main__":
    main()
