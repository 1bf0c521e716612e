"""`hvdtrain bench`: starts a job for each backend, has them measure in turns, and writes rows, a table and a plot."""

import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from hvdtrain import modes
from hvdtrain.bench.turns import Gone, Turns
from hvdtrain.config import recipes
from hvdtrain.config.command_line import NUM_SERVERS, NUM_WORKERS, GroupedCommand
from hvdtrain.config.option_types import EQUAL, FileToWrite, Measure, Real, ServerNumber, Several
from hvdtrain.config.recipes import Launcher
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import Failure, UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.launch.allocation import hosts_or_here
from hvdtrain.launch.hosts import Host, allocate, host_options, launcher_option, secrets_option
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.memory import BASE_MB
from hvdtrain.launch.preflight import Requirements
from hvdtrain.launch.prepare import prepare_program
from hvdtrain.launch.processes import launched_job
from hvdtrain.launch.recipe import JobSpec
from hvdtrain.world.network import WIRE_KEY, new_wire_key

BACKENDS = {"allreduce": ["horovod", "gloo"], "pushpull": ["rpc", "zmq"], "push": ["rpc", "zmq"]}
CARRIERS = [*BACKENDS["allreduce"], *BACKENDS["pushpull"]]
MODES = [name for name in modes.names() if modes.declared(name).has_servers]
# How often a repeat does it, which is divided out: a push takes too little time alone.
TIMES = {"push": 200}
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
SIZE = Measure(  # in bytes
    "size from 4 bytes to 64G", UNITS, 64 * 2**30, "64K, 1M or 553648128", r"(\d{1,12})([KMGkmg]?)", 4
)
Row = dict[str, Any]
Measured = list[dict[str, float]]  # of each repeat: seconds and, where servers say it, server_cpu_s and server_mb


@click.command(cls=GroupedCommand)
@click.option(
    "--op", "ops", type=Several(click.Choice(list(BACKENDS))), metavar="OPERATIONS", default="allreduce,pushpull",
    show_default=True, help="What to time.",
)  # fmt: skip
@click.option(
    "--backend", "backends", type=Several(click.Choice(CARRIERS)), metavar="NAMES", default=",".join(CARRIERS),
    show_default=True,
    help="What carries it: horovod or gloo an all-reduce; rpc or zmq (hvdtrain's servers, see `train --wire`) a push "
    "and pull.",
)  # fmt: skip
@click.option(
    "--bytes", "sizes", type=Several(SIZE), metavar="SIZES", default="1M,16M,128M", show_default=True,
    help="Sizes of the vector.",
)  # fmt: skip
@click.option(
    *NUM_WORKERS, type=Several(click.IntRange(1, 64)), metavar="NUMBERS", default="2", show_default=True,
    help="Workers: 1,2,4,8.",
)  # fmt: skip
@click.option(
    *NUM_SERVERS, type=ServerNumber(1, 64), default=1, show_default=True, help="Of a push; `equal`: as workers."
)
@click.option(
    "--mode", type=click.Choice(MODES), default="ps-async", show_default=True,
    help="When hvdtrain's servers apply a push.",
)  # fmt: skip
@click.option(
    "--bucket-mb", type=Real(2**-4, 32), default=RunConfig.bucket_mb, show_default=True,
    help="MiB of the vector that travel as one message to or from hvdtrain's servers.",
)  # fmt: skip
@host_options
@launcher_option
@secrets_option
@click.option("--repeats", type=click.IntRange(1, 1000), default=7, show_default=True, help="Timed repeats.")
@click.option("--json", "file", type=FileToWrite(), help="Write the rows to this file.")
@click.pass_context
def bench(
    ctx: click.Context, ops: list[str], backends: list[str], sizes: list[int], workers: list[int], servers: Any,
    mode: str, bucket_mb: float, hosts: str | None, hostfile: Path | None, launcher: Launcher, secrets: dict[str, str],
    repeats: int, file: Path | None,
) -> None:  # fmt: skip
    """Time all-reduce, push and pull, side by side, on this machine or over hosts.

    \b
    hvdtrain bench --bytes 1M,16M
    hvdtrain bench --op pushpull --bytes 528M -n 1 -s 1 --json rows.json
    hvdtrain bench --op pushpull --backend rpc --mode ps-sync --bytes 16M -n 1,2,4,8,16 -s 2
    hvdtrain bench --op push --bytes 4K -n 1
    hvdtrain bench --op allreduce,pushpull --bytes 1M,64M -H node1:2,node2:2

    An all-reduce averages a float32 vector over the workers. A push and pull sends it from each worker to the
    servers, which update their weights with plain SGD and send those back; a push is the same, many times in a row,
    to see what a message costs. In each repeat all backends take turns, another one first each time: once to warm up
    and once timed, while the others' processes are stopped, and keep their memory. Shown are the median, the range, and
    GB/s: all workers' bytes over median seconds, where a push and pull counts once though it moves the vector both
    ways. Of servers: processor time for each push, and peak memory, of all together.
    """
    carried = {op: [backend for backend in BACKENDS[op] if backend in backends] for op in ops}
    if not any(carried.values()):
        raise UsageError(f"none of {', '.join(backends)} carries {', '.join(ops)}")
    if file and file.exists():
        raise UsageError(f"{file} exists: name another file, or remove it yourself")
    sizes, listed = [int(size) for size in sizes], hosts_or_here(ctx)
    for number in workers if listed else ():
        allocate(listed, number)
    rows: list[Row] = []
    for (op, carriers), number in itertools.product(carried.items(), workers):
        if not carriers:
            continue
        held_by = 0 if op == "allreduce" else number if servers == EQUAL else servers
        used = allocate(listed, number, held_by) if listed else []
        hosts_used = list(map(str, used))
        click.echo(f"{op} over {', '.join(carriers)} with {with_noun(number, 'worker')} …", err=True)
        by_backend = _measure(op, carriers, number, held_by, repeats, sizes, mode, bucket_mb, used, launcher, secrets)
        rows += [
            {"op": op, "backend": backend, "workers": number, "servers": held_by, "bytes": size, "hosts": hosts_used}
            | ({"mode": mode, "bucket_mb": bucket_mb} if held_by else {})
            | _figures(measured, size, number, TIMES.get(op, 1))
            for backend, of_sizes in by_backend.items()
            for size, measured in zip(sizes, of_sizes, strict=True)
        ]
    if file:
        file.write_text(json.dumps(rows, indent=2) + "\n")
    _show(rows)


def _measure(
    op: str, backends: Sequence[str], workers: int, servers: int, repeats: int, sizes: Sequence[int], mode: str,
    bucket_mb: float, hosts: Sequence[Host], launcher: Launcher, secrets: Mapping[str, str],
) -> dict[str, list[Measured]]:  # fmt: skip
    """Of each backend and size what its workers measured, in turns: each repeat has every backend once, and another one
    first. One more repeat before them is not counted, in which memory is touched for the first time.

    Args:
        hosts: each with its slots; none for this machine.
        secrets: variables for every rank that no command line may show. Ranks on other hosts read them from a file, in
            the current folder, which is then one that the hosts share.
    """
    shared = Path.cwd() if hosts and secrets else None
    by_backend: dict[str, list[Measured]] = {backend: [[] for _ in sizes] for backend in backends}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-", dir=shared) as folder, contextlib.ExitStack() as stack:
        # Where hosts are refused, too.
        turns = stack.enter_context(contextlib.closing(Turns(None if hosts else Path(folder))))
        # All of them hold vectors at once.
        needed_mb = len(backends) * (BASE_MB + 4 * max(sizes) / 2**20)
        needs = Requirements("", None, [folder] if shared else [], needed_mb)
        jobs = {}
        for backend in backends:
            words = [turns.addresses, backend, str(servers), mode, str(TIMES.get(op, 1)), str(bucket_mb)]
            tuned = {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}  # the latter: huge pages
            if backend == "zmq" and hosts:  # for vectors of ones, it may be seen on a command line
                tuned[WIRE_KEY] = new_wire_key()
            spec = JobSpec(
                workers + servers, [sys.executable, "-Pm", "hvdtrain.bench.turns", *words], servers, hosts,
                Path(folder, backend), environment=tuned, secrets=secrets, needs_network=bool(hosts),
            )  # fmt: skip
            log = Path(folder, f"{backend}.log")
            command = prepare_program(launcher if hosts else recipes.launcher("local"), spec, needs)
            jobs[backend] = stack.enter_context(launched_job(command, log)), log
        stack.callback(turns.close)  # before jobs are ended: their ranks end by themselves

        def look() -> None:
            for backend, (job, _) in jobs.items():
                if job.poll() is not None:
                    raise Gone(backend)

        try:
            turns.meet((workers + servers) * len(backends), look)
            for (number, size), repeat in itertools.product(enumerate(sizes), range(1 + repeats)):
                first = repeat % len(backends)
                for backend in [*backends[first:], *backends[:first]]:
                    measured = turns.measure(backend, size)
                    by_backend[backend][number] += [measured] if repeat else []
        except Gone as gone:
            job, log = jobs[str(gone)]
            why = failure_reason(log, job.wait())
            raise Failure(f"{gone} with {with_noun(workers, 'worker')} did not run: {why}") from None
    return by_backend


def _figures(measured: Measured, size: int, workers: int, times: int) -> dict[str, float]:
    """What a row has of the repeats, each of which did the operation so many times."""
    seconds = [one["seconds"] / times for one in measured]
    median = statistics.median(seconds)
    figures = {
        "seconds_median": median, "seconds_min": min(seconds), "seconds_max": max(seconds),
        "gb_per_s": size / median / 1e9, "payload_gb_per_s": workers * size / median / 1e9, "repeats": len(seconds),
    }  # fmt: skip
    if "server_mb" in measured[0]:
        cpu_s = statistics.fmean(one["server_cpu_s"] for one in measured)
        figures["server_mb"] = max(one["server_mb"] for one in measured)
        figures["server_cpu_ms_per_push"] = cpu_s / times / workers * 1e3
    return figures


def _show(rows: Sequence[Row]) -> None:
    from hvdtrain.console import Console
    from hvdtrain.report.table import rich_table, words_table

    headings = ["", "workers", "servers", "MB", "median ms", "range", "GB/s", "CPU ms", "server MB"]
    lines = []
    for row in rows:
        low, high = row["seconds_min"] * 1e3, row["seconds_max"] * 1e3
        lines.append([
            f"{row['op']} {row['backend']}", str(row["workers"]), str(row["servers"] or ""),
            f"{row['bytes'] / 1e6:,.4g}", f"{row['seconds_median'] * 1e3:,.4g}", f"{low:,.4g} to {high:,.4g}",
            f"{row['payload_gb_per_s']:.3f}",
            f"{row['server_cpu_ms_per_push']:,.3g}" if "server_mb" in row else "",
            f"{row['server_mb']:,.0f}" if "server_mb" in row else "",
        ])  # fmt: skip
    console = Console(200)
    console.print(rich_table(words_table("", headings, lines)))
    hosts = sorted({host.split(":")[0] for row in rows for host in row["hosts"]})
    console.print(
        f"n = {rows[0]['repeats']} repeats; GB/s of all workers together, a push and pull counts the vector once; "
        f"CPU is all servers' processor time of a worker's push; on {', '.join(hosts) or 'this machine'}"
    )
