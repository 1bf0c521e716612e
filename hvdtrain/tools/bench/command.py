"""`hvdtrain bench`: starts a job for each backend, has all measure in turns, prints a table."""

import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvdtrain.base import modes
from hvdtrain.base.config import recipes
from hvdtrain.base.config.command_line import NUM_SERVERS, NUM_WORKERS, GroupedCommand
from hvdtrain.base.config.option_types import (
    EQUAL,
    FileToWrite,
    Real,
    ServerNumber,
    Several,
    WithUnit,
)
from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.system.preempt import ended_by_signals
from hvdtrain.base.world.network import WIRE_KEY, new_wire_key
from hvdtrain.job.buckets.send_queue import largest_push
from hvdtrain.launch.allocation import hosts_or_here
from hvdtrain.launch.hosts import Host, allocate, host_options, launcher_option, secrets_option
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.memory import BASE_MB
from hvdtrain.launch.preflight import Requirements
from hvdtrain.launch.prepare import prepare_program
from hvdtrain.launch.processes import launched_job
from hvdtrain.launch.recipe import JobSpec
from hvdtrain.tools.bench.turns import KEY, Gone, Turns

BACKENDS = {"allreduce": ["horovod", "gloo"], "pushpull": ["rpc", "zmq"], "push": ["rpc", "zmq"]}
CARRIERS = [*BACKENDS["allreduce"], *BACKENDS["pushpull"]]
MODES = [name for name in modes.names() if modes.declared(name).has_servers]
# Operations of a repeat, whose time is divided by this number. One push takes too little time.
TIMES = {"push": 200}
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
# A size in bytes.
SIZE = WithUnit(
    "size from 4 bytes to 64G",
    UNITS,
    64 * 2**30,
    "64K, 16.8M or 553648128",
    r"(\d{1,12}(?:\.\d{1,9})?)([KMGkmg]?)",
    4,
)
Row = dict[str, Any]
# For each repeat `seconds` and, where there are servers, `server_cpu_s` and `server_mb`.
Measured = list[dict[str, float]]


@dataclass(frozen=True)
class Series:
    """An operation that several backends measure in turns, over sizes of the vector.

    Attributes:
        op: One of BACKENDS.
        backends: The backends that carry it.
        workers: The number of workers.
        servers: The number of servers; 0 for an all-reduce.
        hosts: Hosts, each with its slots; none for this machine.
        sizes: Bytes of the vector.
        repeats: Timed repeats of each size.
        mode: The mode of the servers.
        bucket_mb: MiB of the vector in one message, at most.
    """

    op: str
    backends: Sequence[str]
    workers: int
    servers: int
    hosts: Sequence[Host]
    sizes: Sequence[int]
    repeats: int
    mode: str
    bucket_mb: float

    @property
    def times(self) -> int:
        """How often a repeat does the operation."""
        return TIMES.get(self.op, 1)


@click.command(cls=GroupedCommand)
@click.option(
    "--op",
    "ops",
    type=Several(click.Choice(list(BACKENDS))),
    metavar="OPERATIONS",
    default="allreduce,pushpull",
    show_default=True,
    help="What to time.",
)
@click.option(
    "--backend",
    "backends",
    type=Several(click.Choice(CARRIERS)),
    metavar="NAMES",
    default=",".join(CARRIERS),
    show_default=True,
    help="What carries the messages: horovod or gloo for an all-reduce; rpc or zmq (hvdtrain's "
    "servers, see `train --wire`) for a push and pull.",
)
@click.option(
    "--bytes",
    "sizes",
    type=Several(SIZE),
    metavar="SIZES",
    default="1M,16M,128M",
    show_default=True,
    help="Sizes of the vector: K, M and G are KiB, MiB and GiB.",
)
@click.option(
    *NUM_WORKERS,
    type=Several(click.IntRange(1, 64)),
    metavar="NUMBERS",
    default="2",
    show_default=True,
    help="Workers: 1,2,4,8.",
)
@click.option(
    *NUM_SERVERS,
    type=ServerNumber(1, 64),
    default=1,
    show_default=True,
    help="Servers of a push; `equal`: as many as workers.",
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="ps-async",
    show_default=True,
    help="Parameter-server mode that is timed.",
)
@click.option(
    "--bucket-mb",
    type=Real(2**-4, 32),
    default=RunConfig.bucket_mb,
    show_default=True,
    help="MiB of the vector that travel as one message to or from hvdtrain's servers. At most 16 "
    "divided by the number of workers are used, or 0.5 if that is more.",
)
@host_options
@launcher_option
@secrets_option
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=7, show_default=True, help="Timed repeats."
)
@click.option("--json", "file", type=FileToWrite(), help="Write the rows to this file.")
@click.pass_context
@ended_by_signals
def bench(
    ctx: click.Context,
    ops: list[str],
    backends: list[str],
    sizes: list[int],
    workers: list[int],
    servers: Any,
    mode: str,
    bucket_mb: float,
    hosts: str | None,
    hostfile: Path | None,
    launcher: Launcher,
    secrets: dict[str, str],
    repeats: int,
    file: Path | None,
) -> None:
    """Time all-reduce, push and pull, side by side, on this machine or over hosts.

    \b
    hvdtrain bench --bytes 1M,16M
    hvdtrain bench --op pushpull --bytes 528M -n 1 -s 1 --json rows.json
    hvdtrain bench --op pushpull --backend rpc --mode ps-sync --bytes 16M -n 1,2,4,8,16 -s 2
    hvdtrain bench --op push --bytes 4K -n 1
    hvdtrain bench --op allreduce,pushpull --bytes 1M,64M -H node1:2,node2:2

    An all-reduce averages a float32 vector over the workers. In a push and pull each worker sends
    the vector to the servers, which update their weights with plain SGD and send them back. `push`
    repeats a push and pull 200 times, and reports the time of one: use it with small sizes. In each
    repeat every backend runs twice, to warm up and then timed. The order of the backends changes
    from repeat to repeat. Meanwhile the processes of the other backends are paused, and keep their
    memory. The table has the median and the range of the time, the processor time of all servers
    for each push, and their peak memory together. GB/s is the bytes of all workers divided by the
    median time. A push and pull counts the vector once, although it travels both ways.
    """
    carried = {op: [backend for backend in BACKENDS[op] if backend in backends] for op in ops}
    if not any(carried.values()):
        raise UsageError(f"none of {', '.join(backends)} carries {', '.join(ops)}")
    if file and file.exists():
        raise UsageError(f"{file} exists: name another file, or remove it yourself")
    sizes = [4 * round(size / 4) for size in sizes]  # of float32 numbers
    listed = hosts_or_here(ctx)
    if listed:
        for number in workers:
            allocate(listed, number)  # refuses too few slots before anything is measured
    rows: list[Row] = []
    for (op, carriers), number in itertools.product(carried.items(), workers):
        if not carriers:
            continue
        held_by = _number_of_servers(op, servers, number)
        used = allocate(listed, number, held_by) if listed else []
        used_mb = largest_push(int(bucket_mb * 2**20), number) / 2**20
        series = Series(op, carriers, number, held_by, used, sizes, repeats, mode, used_mb)
        click.echo(
            f"{op} over {', '.join(carriers)} with {with_noun(number, 'worker')} …", err=True
        )
        rows += _rows(series, _measure(series, launcher, secrets))
    if file:
        write_whole(file, json.dumps(rows, indent=2) + "\n")
    _show(rows)


def _number_of_servers(op: str, servers: Any, workers: int) -> int:
    if op == "allreduce":
        return 0
    return workers if servers == EQUAL else servers


def _rows(series: Series, measured: Mapping[str, Sequence[Measured]]) -> list[Row]:
    """Returns a row for each backend and size."""
    rows = []
    for backend, by_size in measured.items():
        for size, of_size in zip(series.sizes, by_size, strict=True):
            row: Row = {
                "op": series.op,
                "backend": backend,
                "workers": series.workers,
                "servers": series.servers,
                "bytes": size,
                "hosts": list(map(str, series.hosts)),
            }
            if series.servers:
                row |= {"mode": series.mode, "bucket_mb": series.bucket_mb}
            rows.append(row | _figures(of_size, size, series.workers, series.times))
    return rows


def _measure(
    series: Series, launcher: Launcher, secrets: Mapping[str, str]
) -> dict[str, list[Measured]]:
    """Starts a job for each backend, and has them measure in turns.

    Args:
        series: What to measure.
        launcher: Starts the jobs, if there are hosts.
        secrets: Variables for every rank that no command line may show. Ranks on other hosts read
            them from a file in the current folder, which these hosts share then.

    Returns:
        For each backend and size the repeats.

    Raises:
        Failure: A job ended before it had measured.
    """
    backends = series.backends
    shared = Path.cwd() if series.hosts and secrets else None
    with (
        tempfile.TemporaryDirectory(prefix="hvdtrain-bench-", dir=shared) as folder,
        contextlib.ExitStack() as stack,
    ):
        # Closed also if hosts are refused.
        turns = Turns(None if series.hosts else Path(folder))
        stack.enter_context(contextlib.closing(turns))
        # Ranks of all backends hold vectors at the same time.
        needed_mb = len(backends) * (BASE_MB + 4 * max(series.sizes) / 2**20)
        needs = Requirements("", None, [folder] if shared else [], needed_mb)
        starter = launcher if series.hosts else recipes.launcher("local")
        jobs = {}
        for backend in backends:
            spec = _job(series, backend, turns, Path(folder, backend), secrets)
            log = Path(folder, f"{backend}.log")
            command = prepare_program(starter, spec, needs)
            jobs[backend] = stack.enter_context(launched_job(command, log)), log
        # Before the jobs are ended: then their ranks end by themselves.
        stack.callback(turns.close)

        def check_jobs() -> None:
            for backend, (job, _) in jobs.items():
                if job.poll() is not None:
                    raise Gone(backend)

        try:
            turns.meet((series.workers + series.servers) * len(backends), check_jobs)
            return _take_turns(series, turns)
        except Gone as gone:
            job, log = jobs[str(gone)]
            why = failure_reason(log, job.wait())
            raise Failure(
                f"{gone} with {with_noun(series.workers, 'worker')} did not run: {why}"
            ) from None


def _take_turns(series: Series, turns: Turns) -> dict[str, list[Measured]]:
    """Has every backend measure once in each repeat, another backend first each time.

    The first repeat of a size, in which memory is touched for the first time, is not counted.
    """
    backends = series.backends
    measured: dict[str, list[Measured]] = {}
    for backend in backends:
        measured[backend] = [[] for _ in series.sizes]
    for number, size in enumerate(series.sizes):
        for repeat in range(1 + series.repeats):
            first = repeat % len(backends)
            for backend in [*backends[first:], *backends[:first]]:
                figures = turns.measure(backend, size)
                if repeat:
                    measured[backend][number].append(figures)
    return measured


def _job(
    series: Series, backend: str, turns: Turns, out: Path, secrets: Mapping[str, str]
) -> JobSpec:
    """Returns the job of one backend."""
    arguments = [
        turns.addresses,
        backend,
        str(series.servers),
        series.mode,
        str(series.times),
        str(series.bucket_mb),
    ]
    environment = {
        "OMP_NUM_THREADS": "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages
        KEY: turns.key,
    }
    # The key may be seen on a command line: the vectors are ones.
    if backend == "zmq" and series.hosts:
        environment[WIRE_KEY] = new_wire_key()
    return JobSpec(
        series.workers + series.servers,
        [sys.executable, "-Pm", "hvdtrain.tools.bench.turns", *arguments],
        series.servers,
        series.hosts,
        out,
        environment=environment,
        secrets=secrets,
        needs_network=bool(series.hosts),
    )


def _figures(measured: Measured, size: int, workers: int, times: int) -> dict[str, float]:
    """Returns the figures of a row.

    Args:
        measured: The repeats.
        size: Bytes of the vector.
        workers: The number of workers.
        times: How often a repeat did the operation.
    """
    seconds = [repeat["seconds"] / times for repeat in measured]
    median = statistics.median(seconds)
    figures = {
        "seconds_median": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "gb_per_s": size / median / 1e9,
        "payload_gb_per_s": workers * size / median / 1e9,
        "repeats": len(seconds),
    }
    if "server_mb" in measured[0]:
        cpu_s = statistics.fmean(repeat["server_cpu_s"] for repeat in measured)
        figures["server_mb"] = max(repeat["server_mb"] for repeat in measured)
        figures["server_cpu_ms_per_push"] = cpu_s / times / workers * 1e3
    return figures


def _show(rows: Sequence[Row]) -> None:
    from hvdtrain.base.console import Console
    from hvdtrain.reporting.table import print_table, words_table

    headings = [
        "",
        "workers",
        "servers",
        "MiB",
        "median ms",
        "range",
        "GB/s",
        "CPU ms",
        "server MiB",
    ]
    lines = []
    for row in rows:
        low = row["seconds_min"] * 1e3
        high = row["seconds_max"] * 1e3
        lines.append(
            [
                f"{row['op']} {row['backend']}",
                str(row["workers"]),
                str(row["servers"] or ""),
                f"{row['bytes'] / 2**20:,.4g}",
                f"{row['seconds_median'] * 1e3:,.4g}",
                f"{low:,.4g} to {high:,.4g}",
                f"{row['payload_gb_per_s']:.3f}",
                f"{row['server_cpu_ms_per_push']:,.3g}" if "server_mb" in row else "",
                f"{row['server_mb']:,.0f}" if "server_mb" in row else "",
            ]
        )
    console = Console(200)
    print_table(console, words_table("", headings, lines))
    hosts = set(itertools.chain.from_iterable(row["hosts"] for row in rows))
    names = sorted({host.split(":")[0] for host in hosts})
    console.print(
        f"n = {rows[0]['repeats']} repeats; GB/s of all workers together, a push and pull counts "
        "the vector once; CPU is all servers' processor time of a worker's push; on "
        f"{', '.join(names) or 'this machine'}"
    )
