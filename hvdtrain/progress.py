"""What a person sees while a job trains: a bar on a terminal, a line an epoch elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text


class TrainingProgress:
    """Shown by the first worker alone.

    Args:
        out: where to print.
        steps: how many there will be, or None where time decides.
        shown: False on every other worker, which shows nothing.
        log_every: tell samples/s and accuracy every so many steps, or 0.
        workers: how many train: what is told of one is taken to be true of each.
    """

    def __init__(self, out: TextIO, steps: int | None, shown: bool, log_every: int, workers: int) -> None:
        self.log_every, self.workers = log_every if shown else 0, workers
        self.samples, self.correct, self.since = 0, 0.0, time.perf_counter()
        self.console = Console(file=out, highlight=False, quiet=not shown)
        self.bar: Progress | None = None
        self.task = TaskID(0)
        if shown and self.console.is_terminal and sys.stderr.isatty():
            self.bar = bar(self.console)
            self.task = self.bar.add_task("training", total=steps)
            self.bar.start()

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def step(self, row: dict[str, Any]) -> None:
        if self.bar:
            self.bar.update(self.task, completed=row["step"])
        if not self.log_every:
            return
        self.samples += row["samples"]
        self.correct += row["samples"] * (row["accuracy"] or 0.0)
        if row["step"] % self.log_every == 0:
            rate = self.workers * self.samples / (time.perf_counter() - self.since)
            self.say(
                f"epoch {row['epoch']:>3}  step {row['step']:>6}  {rate:8.1f} samples/s  "
                f"accuracy {self.correct / max(1, self.samples):.4f}"
            )
            self.samples, self.correct, self.since = 0, 0.0, time.perf_counter()

    def evaluation(self, row: dict[str, Any]) -> None:
        self.say(
            f"epoch {row['epoch']:>3}  step {row['step']:>6}  {row['train_s']:7.1f} s  "
            f"{row['samples'] / max(row['train_s'], 1e-9):8.1f} samples/s  "
            f"val_loss {row['val_loss']:.4f}  val_accuracy {row['val_accuracy']:.4f}"
        )

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def bar(console: Console) -> Progress:
    """The one look of hvdtrain's progress bars."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )  # fmt: skip


@contextmanager
def bytes_bar(what: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Bytes of so many, with rate and time left: on a terminal a bar, elsewhere a line for each quarter."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(what, total=total, completed=done)
            yield lambda now: progress.update(task, completed=now)
        return
    told = 4 * done // total

    def line(now: int) -> None:
        nonlocal told
        if 4 * now // total > told:
            told = 4 * now // total
            console.print(f"{what}: {now:,} of {total:,} bytes", highlight=False, soft_wrap=True)

    yield line


@contextmanager
def count_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """(done, total) of images, with rate and time left: on a terminal a bar, elsewhere a line for each quarter."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
        return

    def line(done: int, total: int) -> None:
        if done * 4 // total > (done - 1) * 4 // total:
            console.print(f"{what}: {done:,} of {total:,} images", highlight=False, soft_wrap=True)

    yield line


class _Rate(ProgressColumn):
    """Images a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s")
