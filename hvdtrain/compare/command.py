"""`hvdtrain compare`: the same model on the same samples under several modes, one after the other, and a report."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hvdtrain.compare.grid import Axes, Planned, dry_run_lines, plan
from hvdtrain.config import recipes
from hvdtrain.config.command_line import MODES, NUM_SERVERS, NUM_WORKERS, GroupedCommand, given_options
from hvdtrain.config.option_types import Names, Numbers, ServerNumbers
from hvdtrain.config.run_config import LENGTHS, RunConfig
from hvdtrain.errors import Failure, UsageError
from hvdtrain.launch.hosts import Host, host_options, hosts_or_here, launcher_option
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.preflight import describe_hosts
from hvdtrain.launch.prepare import prepare
from hvdtrain.launch.processes import launched_job, sigterm_unwinds
from hvdtrain.report.command import margin_options
from hvdtrain.runs.folder import check_free
from hvdtrain.runs.request import train_options
from hvdtrain.world.host import differences
from hvdtrain.world.place import World

PARTING_S = 30.0  # how long the ranks of a job may take to end after its summary is written


def _use_preset(ctx: click.Context, param: click.Parameter, name: str) -> str:
    """The preset's options are defaults: what stands on the command line wins."""
    if name:
        ctx.default_map = recipes.load("presets", name)["options"]
    return name


def _presets() -> str:
    """The presets, a line each, for the end of the help."""
    titles = {name: recipes.load("presets", name)["title"] for name in recipes.names("presets")}
    return "\b\nPresets:\n" + "\n".join(f"  {name:<18}{title}" for name, title in titles.items())


@click.command(cls=GroupedCommand, epilog=_presets())
@click.option(
    "--preset", default="", is_eager=True, callback=_use_preset, metavar="NAME",
    help="Repeat a published experiment, at its size: its options are the defaults of all others here, and the report "
    "has its authors' table with their figures. The names are below.",
)  # fmt: skip
@click.option(
    *MODES, type=Names(), default="single,allreduce,ps-sync,ps-async", show_default=True,
    help="Modes to compare, by commas; see `hvdtrain modes`.",
)  # fmt: skip
@click.option(*NUM_WORKERS, type=Numbers(), default="2", show_default=True, help="Numbers of workers, by commas.")
@click.option(
    *NUM_SERVERS, type=ServerNumbers(), default="1", show_default=True,
    help="Numbers of servers of the ps- modes, by commas; `equal` is as many as workers.",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(1), default=1, show_default=True,
    help="Repeat everything, each time with the next seed; a winner needs five.",
)  # fmt: skip
@host_options
@launcher_option
@click.option("--dry-run", is_flag=True, help="Print the runs and the command that repeats each; run nothing.")
@click.option(
    "--model", type=Names(), default=RunConfig.model, show_default=True,
    help="Models, by commas: each is compared for itself. See `hvdtrain train --help`.",
)  # fmt: skip
@click.option(
    "--batch-size", "-b", type=Numbers(), default=str(RunConfig.batch_size), show_default=True,
    help="Global batches (with --per-worker each worker's), by commas: each is compared for itself.",
)  # fmt: skip
@train_options("mode", "servers", "repeat", "model", "batch_size", snapshot_every="never")
@margin_options
@click.option("--out", default="", help="Folder for runs and report, new or empty  [default: runs/compare-TIME].")
@click.pass_context
def compare(
    ctx: click.Context, preset: str, modes: list[str], workers: list[int], servers: list[int | str], repeats: int,
    hosts: str | None, hostfile: Path | None, launcher: str, dry_run: bool, model: list[str], batch_size: list[int],
    margin: float, accuracy_margin: float, out: str, **options: Any,
) -> None:  # fmt: skip
    """Train in several modes, on this machine or over hosts, and report which was faster and as good.

    \b
    hvdtrain compare
    hvdtrain compare --modes single,allreduce,ddp,ps-sync --workers 1,2 --repeats 3
    hvdtrain compare --dataset FOLDER --model vgg16 --batch-size 64 --time-budget 10m
    hvdtrain compare --modes ps-sync,ps-async --workers 2 --servers 1,2
    hvdtrain compare --model vgg11,vgg16 --batch-size 16,64 --dry-run
    hvdtrain compare --preset cnn-mnist --dataset digits --workers 2
    hvdtrain compare -H node1:2,node2:2 --modes allreduce,ps-sync,ps-async

    Every worker computes with the same number of threads in every run, the baseline too: as many as its share of the
    cores is where that is least, on the fullest host. Every mode sees the same samples in the same global batches.
    With no options it takes a few minutes on two cores.
    """
    given = given_options(ctx, LENGTHS)
    for name in LENGTHS - given if given else ():  # they exclude each other: the preset's gives way
        options[name] = getattr(RunConfig, name)
    listed = hosts_or_here(ctx)
    config, axes = RunConfig(**options), Axes(modes, workers, servers, model, batch_size, repeats)
    if dry_run:
        click.echo("\n".join(dry_run_lines(plan(config, axes, listed, launcher), Path(out or "runs/compare"))))
        return
    if not listed:
        config = dataclasses.replace(config, device=choose_for_all(config, max(workers)))
    cores = _look_at_hosts(listed) if listed else None
    runs = plan(config, axes, listed, launcher, cores)
    folder = Path(out or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}")
    samples = _look(runs, folder)
    failed = _run_all(runs, folder, samples)
    if len(failed) < len(runs):
        _report(folder, preset, margin, accuracy_margin)
    if failed:
        raise Failure(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; logs are in {folder / 'logs'}")


def _look_at_hosts(hosts: list[Host]) -> dict[str, float]:
    """The cores that ranks may use on each host; in what hosts differ is told."""
    found = describe_hosts(hosts, str(Path.cwd()))
    for line in differences(found):
        click.echo(f"hosts differ: {line}")
    return {name: facts["cores_usable"] for name, facts in found.items()}


def choose_for_all(config: RunConfig, most: int) -> str:
    """Where runs of up to so many workers on this machine compute: all of them alike, or they could not be compared.

    Raises:
        UsageError: GPUs are asked for, and there are fewer than workers.
    """
    if config.device == "cpu":  # nothing to ask torch, which takes seconds to import
        return config.device
    import torch

    from hvdtrain.training.device import choose_device

    gpus = torch.cuda.device_count()
    if config.device == "auto" and 0 < gpus < most and not config.share_gpu:
        click.echo(f"all runs compute on the CPU: {most} workers need {most} GPUs, of which {gpus} are here; for GPUs "
                   "give --share-gpu, or fewer --workers")  # fmt: skip
        return "cpu"
    if config.device == "cuda":
        choose_device(config, World("mpirun", most - 1, most, most - 1, most))
    return config.device


def _look(runs: list[Planned], folder: Path) -> int:
    """Find what would fail later, and make the folder; return how many training images there are."""
    from hvdtrain.data.find import find_dataset

    check_free(folder)
    first = runs[0].config
    if first.pretrained not in ("", "imagenet") and not Path(first.pretrained).is_file():
        raise UsageError(f"--pretrained {first.pretrained}: no such file")
    data = find_dataset(first.dataset)
    for run in runs:
        run.config.check_length(len(data.train))
    try:
        (folder / "runs").mkdir(parents=True)
        (folder / "logs").mkdir()
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}; choose another folder") from None
    return len(data.train)


def _run_all(runs: list[Planned], folder: Path, samples: int) -> list[str]:
    """Run one after the other; return the names of those that failed."""
    from rich.console import Console

    from hvdtrain.progress_bars import bar

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
    command = prepare(run.launcher, run.config, run.workers, run.hosts, out)
    steps = position = 0
    with launched_job(command, log) as job:
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
        yield failure_reason(log, code)
    elif lost := json.loads(summary.read_text())["lost_workers"]:
        yield f"it finished without ranks {lost}, which died on the way: the report leaves it out"


def _result(folder: Path) -> str:
    summary = json.loads((folder / "summary.json").read_text())
    loss, accuracy = summary["val_loss"], summary["val_accuracy"]
    learned = f"validation accuracy {accuracy:.4f}" if math.isfinite(loss) else f"DIVERGED: validation loss {loss}"
    return f"{summary['samples_per_s']:.0f} samples/s, {learned}"


def _report(folder: Path, preset: str, *margins: float) -> None:
    from hvdtrain.report import write_report
    from hvdtrain.report.command import print_report
    from hvdtrain.report.runs import find_runs
    from hvdtrain.report.verdict import Margins

    runs = find_runs([folder])
    write_report(runs, folder, preset, Margins(*margins))
    print_report(runs, preset, Margins(*margins))
    click.echo(f"report: {folder / 'report.html'}")
