"""Runs the grid, one run after the other, and shows how far each is."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.compare.earlier import set_aside
from hvdtrain.compare.grid import Planned
from hvdtrain.config.untrusted import parse_json
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.prepare import prepare
from hvdtrain.launch.processes import launched_job, sigterm_unwinds
from hvdtrain.runs.folder import has_full_disk
from hvdtrain.runs.live import last_steps, metrics_file, samples_per_s
from hvdtrain.world.load import beside_others

if TYPE_CHECKING:
    from rich.progress import Progress

    from hvdtrain.console import Console

END_AFTER_SUMMARY_S = 30.0  # how long the ranks of a job may take to end after its summary is written


def run_all(
    runs: Sequence[Planned],
    kept: Mapping[str, Path],
    folder: Path,
    samples: int,
    is_settled: Callable[[int], bool] | None,
    secrets: Mapping[str, str] | None = None,
) -> list[str]:
    """Run those that are not finished yet, one after the other; return the names of those that failed.

    Args:
        kept: the folders of finished runs by name.
        samples: how many training images there are.
        is_settled: whether the repeats up to this one are enough, asked after each; without it, all are done.
        secrets: variables for every rank that no command line may show.
    """
    from hvdtrain.console import Console
    from hvdtrain.progress_bars import bar

    console = Console(soft_wrap=not sys.stdout.isatty())
    if kept:
        console.print(f"{len(kept)} of {len(runs)} runs are there already, and stay as they are")
    failed = []
    repeats = [run.config.repeat for run in runs]
    with bar(console) if console.is_terminal else contextlib.nullcontext() as progress, sigterm_unwinds():
        for number, run in enumerate(runs, 1):
            if run.name not in kept:
                label = f"[{number}/{len(runs)}] {run.title}"
                if problem := _run_one(run, label, folder, samples, console, progress, secrets):
                    failed.append(run.name)
                    full = "; the disk is full" if has_full_disk(folder) else ""
                    console.print(f"{label}: FAILED: {problem}{full}")
            is_last_of_repeat = number < len(runs) and repeats[number] > run.config.repeat
            if is_settled and is_last_of_repeat and is_settled(run.config.repeat):
                console.print(f"the verdict is known after {run.config.repeat} repeats")
                break
    return failed


def _run_one(
    run: Planned, label: str, folder: Path, samples: int, console: "Console", progress: "Progress | None",
    secrets: Mapping[str, str] | None,
) -> str:  # fmt: skip
    """Do a run, and print what came of it; return why it failed, if it did."""
    if place := set_aside(folder, run.name):
        console.print(f"{label}: what an earlier start had left is in {place}")
    budget = run.config.time_budget
    task = progress.add_task(label, total=budget or run.config.total_steps(samples)) if progress else None
    began = time.monotonic()
    problem = ""
    for seen in _follow(run, folder, progress is not None, secrets):
        if isinstance(seen, str):
            problem = seen
        elif progress and task is not None:
            last, rate = seen[-1], samples_per_s([seen])
            # Of one worker, of as many as there are: nobody waits here for the others' files.
            speed = f", {rate * run.workers:.0f} samples/s" if rate else ""
            done = last["time"] if budget else last["step"]
            progress.update(task, completed=done, description=f"{label}: epoch {last['epoch']}{speed}")
    if progress and task is not None:
        progress.remove_task(task)
    if not problem:
        took = time.monotonic() - began
        console.print(f"{label}: {_result(folder / 'runs' / run.name)}, {took:.0f} s in all")
    return problem


def _follow(
    run: Planned, folder: Path, look: bool, secrets: Mapping[str, str] | None
) -> Iterator[list[dict[str, Any]] | str]:
    """Start a run and, if asked to look, yield the first worker's last steps as they come; at the end, if it failed,
    the reason.
    """
    out, log = (folder / "runs" / run.name).absolute(), folder / "logs" / f"{run.name}.log"
    metrics, summary = metrics_file(out, run.config.servers), out / "summary.json"
    command = prepare(run.launcher, run.config, run.workers, run.hosts, out, measure=True, secrets=secrets)
    with launched_job(command, log) as job:
        # A worker that hangs and was given up by the others would let its starter wait for ever.
        while job.poll() is None and not (
            summary.is_file() and time.time() - summary.stat().st_mtime > END_AFTER_SUMMARY_S
        ):
            time.sleep(0.2)
            if look and (steps := last_steps(metrics)):
                yield steps
        code = job.returncode or 0
    if code or not summary.is_file():
        yield failure_reason(log, code)
    elif lost := parse_json(summary.read_text())["lost_workers"]:
        yield f"it finished without ranks {lost}, which died on the way: the report leaves it out"


def _result(folder: Path) -> str:
    summary = parse_json((folder / "summary.json").read_text())
    loss, accuracy = summary["val_loss"], summary["val_accuracy"]
    learned = f"validation accuracy {accuracy:.4f}" if math.isfinite(loss) else f"DIVERGED: validation loss {loss}"
    beside = "".join(f", beside other work: {line}" for line in beside_others(summary.get("load") or {}))
    return f"{summary['samples_per_s']:.0f} samples/s, {learned}{beside}"
