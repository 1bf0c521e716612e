"""`hvdtrain compare`: the same model on the same samples under several modes, one after the other, and a report."""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvdtrain.config import Names, Numbers, RunConfig, config_options
from hvdtrain.errors import Failure, UsageError
from hvdtrain.launch.commands import given_hosts, host_options, prepare
from hvdtrain.launch.hosts import Host, needed
from hvdtrain.launch.processes import reason, sigterm_unwinds, started
from hvdtrain.runfolder import check_free
from hvdtrain.world import World

PARTING_S = 30.0  # how long the ranks of a job may take to end after its summary is written


@dataclass(frozen=True)
class Planned:
    """One run of the grid."""

    config: RunConfig
    workers: int
    hosts: tuple[Host, ...] = ()
    launcher: str = "local"

    @property
    def name(self) -> str:
        servers = f"-s{self.config.servers}" if self.config.servers else ""
        return f"{self.config.mode}-w{self.workers}{servers}-r{self.config.repeat}"

    @property
    def title(self) -> str:
        servers = f", {self.config.servers} server(s)" if self.config.servers else ""
        return f"{self.config.mode} with {self.workers} worker(s){servers}"


def plan(
    config: RunConfig, names: list[str], workers: list[int], servers: int, repeats: int,
    hosts: Sequence[Host] = (), launcher: str = "local",
) -> list[Planned]:  # fmt: skip
    """Every run, in order: all of a repeat before the next, so that a drifting machine drifts for all modes alike.

    Args:
        hosts: where runs of more than one process go; the baseline stays here.

    Raises:
        UsageError: a run that could not be carried out.
    """
    cores = len(os.sched_getaffinity(0))
    most = max([1, *(n for mode in names if mode != "single" for n in workers)])
    threads = config.threads or max(1, cores // most)
    if config.seed + repeats > 2**32:
        raise UsageError(f"--seed {config.seed} with {repeats} repeats goes beyond {2**32 - 1}, the largest seed")
    runs = []
    for repeat in range(1, repeats + 1):
        for mode in names:
            for n in [1] if mode == "single" else workers:
                run = dataclasses.replace(
                    config.for_mode(mode, servers), threads=threads, seed=config.seed + repeat - 1, repeat=repeat
                )
                run.check().check_workers(n)
                ranks = n + run.servers
                used = tuple(needed(hosts, ranks)) if hosts and ranks > 1 else ()
                runs.append(Planned(run, n, used, launcher if used else "local"))
    return runs


@click.command()
@click.option(
    "--modes", "names", type=Names(), default="single,allreduce,ps-sync,ps-async", show_default=True,
    help="Modes to compare, by commas; see `hvdtrain modes`.",
)  # fmt: skip
@click.option("--workers", "-n", type=Numbers(), default="2", show_default=True, help="Numbers of workers, by commas.")
@click.option("--servers", "-s", type=click.IntRange(1), default=1, show_default=True, help="Servers of the ps- modes.")
@click.option(
    "--repeats", type=click.IntRange(1), default=1, show_default=True,
    help="Repeat everything, each time with the next seed; the report then has medians and spreads.",
)  # fmt: skip
@host_options
@click.option(
    "--launcher", type=click.Choice(["ssh", "mpi"]), default="ssh", show_default=True,
    help="With -H or --hostfile: how ranks are started there; see `hvdtrain launch --help`.",
)  # fmt: skip
@config_options("mode", "servers", "repeat")
@click.option("--out", default="", help="Folder for runs and report, new or empty  [default: runs/compare-TIME].")
def compare(
    names: list[str], workers: list[int], servers: int, repeats: int, out: str, hosts: str | None,
    hostfile: Path | None, launcher: str, **options: Any,
) -> None:  # fmt: skip
    """Train one model in several modes, on this machine or over hosts, and report which was faster and as good.

    \b
    hvdtrain compare
    hvdtrain compare --modes single,allreduce,ddp,ps-sync --workers 1,2 --repeats 3
    hvdtrain compare --dataset FOLDER --model vgg16 --width 1 --batch-size 64 --time-budget 10m
    hvdtrain compare -H node1:2,node2:2 --modes allreduce,ps-sync,ps-async

    Every worker computes with the same number of threads in every run, the baseline too, and every mode sees the
    same samples in the same global batches. With no options it takes a few minutes on two cores.
    """
    listed = given_hosts(hosts, hostfile)
    runs = plan(RunConfig(**options), names, workers, servers, repeats, listed, launcher)
    from hvdtrain.data.find import find

    folder = Path(out or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}")
    check_free(folder)
    pretrained = runs[0].config.pretrained
    if pretrained not in ("", "imagenet") and not Path(pretrained).is_file():
        raise UsageError(f"--pretrained {pretrained}: no such file")
    data = find(runs[0].config.dataset)
    runs[0].config.check_length(len(data.train))
    if options["device"] == "cuda":
        from hvdtrain.work import choose_device

        most = max(run.workers for run in runs)
        choose_device(runs[0].config, World("mpirun", most - 1, most, most - 1, most))
    try:
        (folder / "runs").mkdir(parents=True)
        (folder / "logs").mkdir()
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}") from None
    failed = _run_all(runs, folder, len(data.train))
    if len(failed) < len(runs):
        _report(folder)
    if failed:
        raise Failure(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; logs are in {folder / 'logs'}")


def _run_all(runs: list[Planned], folder: Path, samples: int) -> list[str]:
    """Run one after the other; return the names of those that failed."""
    from rich.console import Console

    from hvdtrain.progress import bar

    console = Console(highlight=False)
    failed = []
    with bar(console) if console.is_terminal else contextlib.nullcontext() as progress, sigterm_unwinds():
        for number, run in enumerate(runs, 1):
            label = f"[{number}/{len(runs)}] {run.title}"
            task = progress.add_task(label, total=run.config.total_steps(samples)) if progress else None
            began = time.monotonic()
            problem = None
            for step in _follow(run, folder):
                if isinstance(step, str):
                    problem = step
                elif progress and task is not None:
                    progress.update(task, completed=step)
            if progress and task is not None:
                progress.remove_task(task)
            if problem:
                failed.append(run.name)
                console.print(f"{label}: FAILED: {problem}", markup=False, soft_wrap=True)
            else:
                took = time.monotonic() - began
                console.print(f"{label}: {_result(folder / 'runs' / run.name)}, {took:.0f} s in all", soft_wrap=True)
    return failed


def _follow(run: Planned, folder: Path) -> Iterator[int | str]:
    """Start a run and yield its steps as they come; at the end, if it failed, the reason."""

    out, log = (folder / "runs" / run.name).absolute(), folder / "logs" / f"{run.name}.log"
    metrics, summary = out / f"metrics.rank{run.config.servers}.jsonl", out / "summary.json"
    start = prepare(run.launcher, run.config, run.workers, run.hosts, out)
    steps = position = 0
    with started(start, log) as job:
        # A worker that hangs and was given up by the others would let its starter wait for ever.
        while job.poll() is None and not (summary.is_file() and time.time() - summary.stat().st_mtime > PARTING_S):
            time.sleep(0.2)
            if metrics.is_file():
                with metrics.open("rb") as lines:
                    lines.seek(position)
                    new = lines.read()
                position += len(new)
                steps += new.count(b"\n")
                yield steps
        code = job.returncode or 0
    if code or not summary.is_file():
        yield reason(log, code)
    elif lost := json.loads(summary.read_text())["lost_workers"]:
        yield f"it finished without ranks {lost}, which died on the way: the report leaves it out"


def _result(folder: Path) -> str:
    summary = json.loads((folder / "summary.json").read_text())
    loss, accuracy = summary["val_loss"], summary["val_accuracy"]
    learned = f"validation accuracy {accuracy:.4f}" if math.isfinite(loss) else f"DIVERGED: validation loss {loss}"
    return f"{summary['samples_per_s']:.0f} samples/s, {learned}"


def _report(folder: Path) -> None:
    from hvdtrain.report import write_report
    from hvdtrain.report.commands import show
    from hvdtrain.report.runs import find

    runs = find([folder])
    write_report(runs, folder)
    show(runs)
    click.echo(f"report: {folder / 'report.html'}")
