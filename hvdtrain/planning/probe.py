"""Measures what messages cost: two workers, with a server or without, exchange gradients of a few
blocks over TCP, as a real job does.

Over loopback their processor time is measured with blocks of two sizes. Over links of two rates it
is the wall time, which tells what share of a link they reach.

Ranks are forked from this process, which has torch loaded and none of torch's threads running yet.
"""

import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.base.config.run_config import WIRES
from hvdtrain.base.world.load import FOREIGN_SHARE
from hvdtrain.base.world.network import free_port
from hvdtrain.planning import links
from hvdtrain.planning.scenario import Scenario
from hvdtrain.planning.watch import MOST_TIMES, Watch

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
# The rates of links in Gbit/s, the bytes of a block that crosses them, and the measurements at each.
RATES = (0.3, 1.2)
LINKED = 4 * 2**20
LINKED_SAMPLES = 2
# A measurement over links is disturbed from this share of other work on. It is larger than elsewhere,
# since what the kernel does for the links counts as other work, and steps wait for links mostly.
LINKED_OTHERS = 0.15
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
    """Seconds of each measured step.

    Attributes:
        worker_s: processor seconds of a worker, beyond what a step without other workers costs.
        server_s: processor seconds of the server.
        wall_s: wall seconds.
        others: the share of this machine that other work had meanwhile.
    """

    worker_s: list[float]
    server_s: list[float]
    wall_s: list[float]
    others: float = 0.0

    @property
    def disturbed_by(self) -> float:
        """`others` where it is so much that it disturbs; else 0."""
        return self.others if self.others > FOREIGN_SHARE else 0.0


class ProbedJob(NamedTuple):
    """A job of a transport that is measured once.

    Attributes:
        block: bytes of a block's weights.
        gbit: of the link of each rank, which has a network of its own; None: all are on loopback.
    """

    transport: ProbedTransport
    block: int
    gbit: float | None = None

    @property
    def ranks(self) -> int:
        return WORKERS + self.transport.servers

    @property
    def most_others(self) -> float:
        """The share of the machine that other work may have without disturbing."""
        return LINKED_OTHERS if self.gbit else FOREIGN_SHARE


Measured = dict[tuple[str, float], StepSeconds]


def measure(deadline: float, say: Callable[[str], None]) -> Measured:
    """Measures what steps cost with each transport and size of blocks, as far as there is time.

    Args:
        deadline: on time.monotonic().
        say: shows the user a line.
    """
    # The ranks that are forked have them.
    import hvdtrain.job.ps.serve
    import hvdtrain.job.ps.worker
    import hvdtrain.job.rings.ddp  # noqa: F401

    measured: Measured = {}
    for name, transport in TRANSPORTS.items():
        peers = f"{WORKERS} workers{' and a server' if transport.servers else ''}"
        say(f"messages of {name}: {peers} here, over TCP …")
        for block in (LARGE, SMALL):
            seconds = _measure_undisturbed(ProbedJob(transport, block), deadline)
            if seconds:
                measured[name, block] = seconds
    return measured


def measure_links(deadline: float, say: Callable[[str], None]) -> Measured:
    """Measures how long steps take over links of RATES, by transport and rate.

    What there is no time for is missing, and all of it where this user may make no such links.

    Args:
        deadline: on time.monotonic().
        say: shows the user a line.
    """
    measured: Measured = {}
    if not links.may_be_made():
        return measured
    rates = " and ".join(f"{rate:g}" for rate in RATES)
    say(f"how much of a link they reach: in a private network here, at {rates} Gbit/s …")
    for name, transport in TRANSPORTS.items():
        for gbit in RATES:
            seconds = _measure_undisturbed(ProbedJob(transport, LINKED, gbit), deadline)
            if not seconds:
                return measured
            measured[name, gbit] = seconds
    return measured


def _measure_undisturbed(job: ProbedJob, deadline: float) -> StepSeconds | None:
    """Measures a job, and again if other work disturbed it, as far as there is time.

    Returns:
        The less disturbed measurement; None if a job failed or took too long.
    """
    found: list[StepSeconds] = []
    while len(found) < MOST_TIMES:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        watch = Watch()
        seconds = _measure_job(job, min(left_s, TIMEOUT_S))
        if not seconds:
            break
        found.append(seconds._replace(others=watch.others()))
        if found[-1].others <= job.most_others:
            break
    return min(found, key=lambda seconds: seconds.others, default=None)


def _measure_job(job: ProbedJob, limit_s: float) -> StepSeconds | None:
    """Returns what the first worker measured; None where the job failed or took too long."""
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="hvdtrain-plan-") as folder:
        if not job.gbit:
            return _run_ranks(job, deadline, Path(folder))
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        process = context.Process(target=_run_on_links, args=(job, deadline, Path(folder), results))
        process.start()
        try:
            process.join(limit_s + TIMEOUT_S)
        finally:
            process.kill()
        return None if results.empty() else results.get()


def _run_on_links(job: ProbedJob, deadline: float, folder: Path, results: Any) -> None:
    """Runs a job in a private network, which ends with this process and the ranks.

    Args:
        results: the queue for what the first worker measures.
    """
    _be_silent()
    scratch = folder / "private"
    scratch.mkdir()
    try:
        links.make_switch(scratch)
        seconds = _run_ranks(job, deadline, folder)
    except (OSError, subprocess.SubprocessError):
        return
    if seconds:
        results.put(seconds)


def _run_ranks(job: ProbedJob, deadline: float, folder: Path) -> StepSeconds | None:
    """Starts the ranks of a job, waits for what the first worker measures, and ends the ranks."""
    context = multiprocessing.get_context("fork")
    # No other process puts anything into it: the worker is killed as soon as its result can be
    # read, and may then still hold the queue's lock.
    results = context.SimpleQueue()
    port = free_port("127.0.0.1") if not job.gbit else links.PORT
    are_hosts = context.Semaphore(0)
    are_joined = context.Event()
    enter = partial(_enter_link, job, folder / "private", are_hosts, are_joined)
    processes = [
        context.Process(target=_run_rank, args=(rank, job, port, folder, enter, results))
        for rank in range(job.ranks)
    ]
    try:
        for process in processes:
            process.start()
        if job.gbit:
            _join_links(job.gbit, [process.pid or 0 for process in processes], are_hosts)
            are_joined.set()
        while results.empty() and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.02)
        return None if results.empty() else results.get()
    finally:
        started = [process for process in processes if process.pid]
        for process in started:
            process.kill()
            process.join()


def _join_links(gbit: float, pids: list[int], are_hosts: Any) -> None:
    """Joins ranks to the switch of this process, once each of them is a host.

    Raises:
        OSError: a rank could not become one.
    """
    for _ in pids:
        if not are_hosts.acquire(timeout=TIMEOUT_S / 4):
            raise OSError("a rank has no network of its own")
    for number, pid in enumerate(pids):
        links.join_link(pid, number, gbit)


def _enter_link(job: ProbedJob, scratch: Path, are_hosts: Any, are_joined: Any, rank: int) -> None:
    """Makes this rank a host with a link, if the job has links."""
    if not job.gbit:
        return
    links.become_host(scratch, rank)
    are_hosts.release()
    are_joined.wait(TIMEOUT_S / 4)
    links.use_link(rank, job.gbit)


def _be_silent() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _run_rank(
    rank: int,
    probed: ProbedJob,
    port: int,
    folder: Path,
    enter_link: Callable[[int], None],
    results: Any,
) -> None:
    """Does what a rank of the job does, as long as the rank lives.

    Args:
        enter_link: makes the rank a host with a link, if the job has links.
        results: the queue for what the first worker measures.
    """
    # The rank ends whatever becomes of the process that forked it.
    signal.alarm(int(TIMEOUT_S))
    _be_silent()
    enter_link(rank)
    from hvdtrain.base import modes

    job = _make_job(rank, probed, port, folder)
    mode = modes.load(probed.transport.mode)
    if job.world.is_server:
        mode.serve(job, print)
        os._exit(0)
    alone_s = min(_measure_steps(None, probed).worker_s)
    together = _measure_steps(mode.connect(job), probed)
    if job.world.is_chief:
        beyond_s = [max(FLOOR, cpu_s - alone_s) for cpu_s in together.worker_s]
        results.put(together._replace(worker_s=beyond_s))
    # Until the rank is ended. If one left, the others would complain.
    time.sleep(TIMEOUT_S)


def _make_job(rank: int, probed: ProbedJob, port: int, folder: Path) -> "Job":
    """Returns the job as a rank on one thread knows it, and sets this process up for it."""
    transport = probed.transport
    on_links = probed.gbit is not None
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(probed.ranks),
        "LOCAL_RANK": "0" if on_links else str(rank),
        "LOCAL_WORLD_SIZE": "1" if on_links else str(probed.ranks),
        "MASTER_ADDR": links.address_of(0) if on_links else "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    from hvdtrain.base.config.run_config import RunConfig
    from hvdtrain.base.world.network import use_one_interface
    from hvdtrain.base.world.place import read_world
    from hvdtrain.job.coordination.job import Job
    from hvdtrain.runs.request import choice

    torch.set_num_threads(1)
    world = read_world(transport.servers)
    use_one_interface(world)
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


def _measure_steps(sync: Any, job: ProbedJob) -> StepSeconds:
    """Measures steps of a model of equal blocks.

    Args:
        sync: the mode's synchroniser; None: without other workers.
    """
    import torch

    model = _model_of_blocks(job.block)
    module = sync.prepare(model) if sync else model
    steps = 8 if job.block == SMALL else 1
    samples = LINKED_SAMPLES if job.gbit else SAMPLES
    measured = StepSeconds([], [], [])
    for sample in range(1 + samples):
        if sync:
            sync.group.barrier()
        servers_began_s = _servers_cpu_s(sync)
        began_s = time.process_time()
        wall_began_s = time.perf_counter()
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
        wall_s = time.perf_counter() - wall_began_s
        is_warm_up = sample == 0
        if not is_warm_up:
            measured.wall_s.append(wall_s / steps)
            measured.worker_s.append((time.process_time() - began_s) / steps)
            measured.server_s.append((_servers_cpu_s(sync) - servers_began_s) / steps)
    return measured
