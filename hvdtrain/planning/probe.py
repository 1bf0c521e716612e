"""The real thing in its smallest form: two workers and a server exchange gradients of a few blocks, over TCP.

Ranks are forked from this process, which has torch loaded and no thread of it running yet.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config.run_config import WIRES
from hvdtrain.planning.scenario import Scenario
from hvdtrain.world.network import free_port

WORKERS = 2
SMALL, LARGE = 16 * 2**10, 8 * 2**20  # bytes of a block
BLOCKS = 4
SAMPLES = 4  # measurements of each
# Of each transport: a mode, its servers, and what carries their messages.
OF_KIND = {Scenario("ps-sync", servers=1, wire=wire).carrier: ("ps-sync", 1, wire) for wire in WIRES}
OF_KIND |= {name: (name, 0, WIRES[0]) for name in ("allreduce", "ddp")}  # whose messages no wire of servers' carries
TIMEOUT_S = 20.0
# Set before torch is imported: one thread computes; huge pages, as workers have them; TCP as between hosts.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1", "HVDTRAIN_OVER_TCP": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}  # fmt: skip
FLOOR = 1e-9  # seconds of what noise hides


class Measured(NamedTuple):
    """Processor seconds of each step: of a worker, beyond those of a step alone, and of the server."""

    worker_s: list[float]
    server_s: list[float]


def measure(deadline: float) -> dict[tuple[str, int], Measured]:
    """What a step costs of each kind of mode and each size of block, as far as known by then on time.monotonic()."""
    import hvdtrain.modes.ddp
    import hvdtrain.modes.ps_sync  # noqa: F401

    measured = {}
    for kind in OF_KIND:
        for block in (LARGE, SMALL):
            left = deadline - time.monotonic()
            if left > 0 and (result := _job(kind, block, min(left, TIMEOUT_S))):
                measured[kind, block] = result
    return measured


def _job(kind: str, block: int, limit_s: float) -> Measured | None:
    """What the first worker measured; None where the job failed or took too long."""
    ranks = WORKERS + OF_KIND[kind][1]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-plan-") as folder:
        processes = [
            context.Process(target=_rank, args=(rank, ranks, port, kind, block, folder, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit_s
        while results.empty() and time.monotonic() < deadline and not any(p.exitcode for p in processes):
            time.sleep(0.02)
        result = None if results.empty() else results.get()
        for process in processes:
            process.kill()
            process.join()
        return result


def _rank(rank: int, ranks: int, port: int, kind: str, block: int, folder: str, results: Any) -> None:
    signal.alarm(int(TIMEOUT_S))  # whatever becomes of the process that forked it
    mode, servers, wire = OF_KIND[kind]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    import torch

    from hvdtrain import modes
    from hvdtrain.config.run_config import RunConfig
    from hvdtrain.coordination.job import Job
    from hvdtrain.runs.request import choice
    from hvdtrain.system.memory import keep_memory
    from hvdtrain.world.network import use_one_interface
    from hvdtrain.world.place import read_world

    torch.set_num_threads(1)
    world = read_world(servers)
    use_one_interface(world)
    if servers:
        keep_memory()
    config = RunConfig(mode=mode, servers=servers, wire=wire, optimizer="sgd", momentum=0.0, timeout=TIMEOUT_S)
    job = Job(config, world, Path(folder), torch.device("cpu"), threads=1, wait_for=choice(config, "wait_for"))
    if world.is_server:
        modes.load(mode).serve(job, print)
        os._exit(0)
    alone_s = min(_measure(None, block).worker_s)
    together = _measure(modes.load(mode).connect(job), block)
    if world.is_chief:
        results.put(together._replace(worker_s=[max(FLOOR, cpu_s - alone_s) for cpu_s in together.worker_s]))
    time.sleep(TIMEOUT_S)  # until it is ended: one that leaves would have others complain


def _measure(sync: Any, block: int) -> Measured:
    """Processor seconds of this worker and of the servers for a step of a model of equal blocks."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(block // 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weights[:1].sum() + 0 * self.weights.sum()

    def servers_cpu_s() -> float:
        asks = sync and not sync.group.worker
        return sum(server["cpu_s"] for server in sync.ask_servers("cost")) if asks else 0.0

    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    module = sync.prepare(model) if sync else model
    steps = 1 if block >= LARGE else 8  # of a measurement
    measured = Measured([], [])
    for sample in range(1 + SAMPLES):
        if sync:
            sync.group.barrier()
        servers_s, used_s = servers_cpu_s(), time.process_time()
        for step in range(sample * steps, (sample + 1) * steps):
            if sync:
                sync.begin(step + 1, 1e-3)
            module(torch.zeros(1)).sum().backward()
            if sync:
                sync.wait()
                sync.update()
            model.zero_grad(set_to_none=True)
        with torch.no_grad():
            module(torch.zeros(1))  # waits for the last answers
        if sample:  # the first is to warm up
            measured.worker_s.append((time.process_time() - used_s) / steps)
            measured.server_s.append((servers_cpu_s() - servers_s) / steps)
    return measured
