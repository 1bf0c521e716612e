"""Measures what messages cost: two workers, with a server or without, exchange gradients of a few
blocks over TCP, as a real job does.

Ranks are forked from this process, which has torch loaded and none of torch's threads running yet.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.base.config.run_config import WIRES
from hvdtrain.base.world.network import free_port
from hvdtrain.planning.scenario import Scenario

if TYPE_CHECKING:
    from torch import nn

    from hvdtrain.job.coordination.job import Job

WORKERS = 2
# Bytes of a block.
SMALL = 16 * 2**10
LARGE = 8 * 2**20
BLOCKS = 4
# Measurements of each transport and size of blocks.
SAMPLES = 4
TIMEOUT_S = 20.0
# Set before torch is imported. One thread computes, memory has huge pages as workers' has, and
# messages travel over TCP as between hosts.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "HVDTRAIN_OVER_TCP": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Seconds that stand for a difference which noise hides.
FLOOR = 1e-9


class ProbedTransport(NamedTuple):
    """A job whose messages show what a transport costs."""

    mode: str
    servers: int
    wire: str


def _probed_transports() -> dict[str, ProbedTransport]:
    transports = {}
    for wire in WIRES:
        name = Scenario("ps-sync", servers=1, wire=wire).transport_name
        transports[name] = ProbedTransport("ps-sync", 1, wire)
    # No wire of servers carries messages of rings.
    for mode in ("allreduce", "ddp"):
        transports[mode] = ProbedTransport(mode, 0, WIRES[0])
    return transports


# By transport, as a calibration names them.
TRANSPORTS = _probed_transports()


class StepSeconds(NamedTuple):
    """Processor seconds of each measured step.

    Attributes:
        worker_s: of a worker, beyond what a step without other workers costs.
        server_s: of the server.
    """

    worker_s: list[float]
    server_s: list[float]


def measure(deadline: float, say: Callable[[str], None]) -> dict[tuple[str, int], StepSeconds]:
    """Measures what steps cost with each transport and size of blocks, as far as there is time.

    Args:
        deadline: on time.monotonic().
        say: shows the user a line.
    """
    # The ranks that are forked have them.
    import hvdtrain.job.ps.serve
    import hvdtrain.job.ps.worker
    import hvdtrain.job.rings.ddp  # noqa: F401

    measured = {}
    for name, transport in TRANSPORTS.items():
        peers = f"{WORKERS} workers{' and a server' if transport.servers else ''}"
        say(f"messages of {name}: {peers} here, over TCP …")
        for block in (LARGE, SMALL):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                continue
            seconds = _measure_job(transport, block, min(left_s, TIMEOUT_S))
            if seconds:
                measured[name, block] = seconds
    return measured


def _measure_job(transport: ProbedTransport, block: int, limit_s: float) -> StepSeconds | None:
    """Returns what the first worker measured; None where the job failed or took too long."""
    ranks = WORKERS + transport.servers
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-plan-") as folder:
        processes = [
            context.Process(
                target=_run_rank, args=(rank, ranks, port, transport, block, folder, results)
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit_s
        while results.empty() and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.02)
        result = None if results.empty() else results.get()
        for process in processes:
            process.kill()
            process.join()
        return result


def _run_rank(
    rank: int,
    ranks: int,
    port: int,
    transport: ProbedTransport,
    block: int,
    folder: str,
    results: Any,
) -> None:
    """Does what a rank of the job does, as long as the rank lives.

    Args:
        results: the queue for what the first worker measures.
    """
    # The rank ends whatever becomes of the process that forked it.
    signal.alarm(int(TIMEOUT_S))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    from hvdtrain.base import modes

    job = _make_job(rank, ranks, port, transport, Path(folder))
    mode = modes.load(transport.mode)
    if job.world.is_server:
        mode.serve(job, print)
        os._exit(0)
    alone_s = min(_measure_steps(None, block).worker_s)
    together = _measure_steps(mode.connect(job), block)
    if job.world.is_chief:
        beyond_s = [max(FLOOR, cpu_s - alone_s) for cpu_s in together.worker_s]
        results.put(together._replace(worker_s=beyond_s))
    # Until the rank is ended. If one left, the others would complain.
    time.sleep(TIMEOUT_S)


def _make_job(rank: int, ranks: int, port: int, transport: ProbedTransport, folder: Path) -> "Job":
    """Returns the job as a rank on one thread knows it, and sets this process up for it."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    from hvdtrain.base.config.run_config import RunConfig
    from hvdtrain.base.system.memory import keep_memory
    from hvdtrain.base.world.network import use_one_interface
    from hvdtrain.base.world.place import read_world
    from hvdtrain.job.coordination.job import Job
    from hvdtrain.runs.request import choice

    torch.set_num_threads(1)
    world = read_world(transport.servers)
    use_one_interface(world)
    if transport.servers:
        keep_memory()
    config = RunConfig(
        mode=transport.mode,
        servers=transport.servers,
        wire=transport.wire,
        optimizer="sgd",
        momentum=0.0,
        timeout=TIMEOUT_S,
    )
    wait_for = choice(config, "wait_for")
    return Job(config, world, folder, torch.device("cpu"), threads=1, wait_for=wait_for)


def _model_of_blocks(block: int) -> "nn.Module":
    """Returns a model of BLOCKS equal blocks with so many bytes of weights each."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(block // 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weights[:1].sum() + 0 * self.weights.sum()

    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def _servers_cpu_s(sync: Any) -> float:
    """Returns the processor seconds of all servers so far, if this is the first worker."""
    is_first_worker = sync and not sync.group.worker
    if not is_first_worker:
        return 0.0
    return sum(server["cpu_s"] for server in sync.ask_servers("cost"))


def _measure_steps(sync: Any, block: int) -> StepSeconds:
    """Measures steps of a model of equal blocks.

    Args:
        sync: the mode's synchroniser; None: without other workers.
        block: bytes of a block's weights.
    """
    import torch

    model = _model_of_blocks(block)
    module = sync.prepare(model) if sync else model
    steps = 1 if block >= LARGE else 8
    measured = StepSeconds([], [])
    for sample in range(1 + SAMPLES):
        if sync:
            sync.group.barrier()
        servers_began_s = _servers_cpu_s(sync)
        began_s = time.process_time()
        for step in range(sample * steps, (sample + 1) * steps):
            if sync:
                sync.begin(step + 1, 1e-3)
            module(torch.zeros(1)).sum().backward()
            if sync:
                sync.wait()
                sync.update()
            model.zero_grad(set_to_none=True)
        with torch.no_grad():
            # Waits for the last answers.
            module(torch.zeros(1))
        is_warm_up = sample == 0
        if not is_warm_up:
            measured.worker_s.append((time.process_time() - began_s) / steps)
            measured.server_s.append((_servers_cpu_s(sync) - servers_began_s) / steps)
    return measured
