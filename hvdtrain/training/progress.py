"""What a person sees while a job trains: a bar on a terminal, a line an epoch elsewhere."""

import sys
import time
from typing import Any, TextIO

from rich.progress import Progress, TaskID

from hvdtrain.console import Console, bar


class TrainingProgress:
    """Shown by the worker that leads alone.

    Args:
        out: where to print.
        steps: how many there will be, or None where time decides.
        shown: False on every other worker, which shows nothing.
        log_every: print samples/s and accuracy every so many steps, or 0 for never.
        workers: how many train: samples/s are of all of them.
        first_step: the step of the snapshot that training goes on from, or 0.
    """

    def __init__(
        self, out: TextIO, steps: int | None, shown: bool, log_every: int, workers: int, first_step: int = 0
    ) -> None:
        self.wanted_every, self.workers = log_every, workers
        self.log_every = log_every if shown else 0
        self.rows, self.samples, self.correct, self.since = 0, 0, 0.0, time.perf_counter()
        self.printed = first_step
        self.console = Console(file=out, quiet=not shown)
        self.bar: Progress | None = None
        self.task = TaskID(0)
        if shown and self.console.is_terminal and sys.stderr.isatty():
            self.bar = bar(self.console)
            self.task = self.bar.add_task("training", total=steps)
            self.bar.start()

    def lead(self) -> None:
        """Show it from now on: the worker that did is lost, or is this one."""
        self.log_every, self.console.quiet = self.wanted_every, False

    def print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def step(self, row: dict[str, Any]) -> None:
        if self.bar:
            self.bar.update(self.task, completed=row["step"])
        if not self.log_every:
            return
        self.rows += 1
        self.samples += row["samples"]
        self.correct += row["samples"] * (row["accuracy"] or 0.0)
        if row["step"] // self.log_every > self.printed // self.log_every:
            # Of leased shares this worker may have had more or fewer than one a step.
            of_all = self.workers * self.samples / self.rows * (row["step"] - self.printed)
            rate = of_all / (time.perf_counter() - self.since)
            self.print(
                f"epoch {row['epoch']:>3}  step {row['step']:>6}  {rate:8.1f} samples/s  "
                f"accuracy {self.correct / max(1, self.samples):.4f}"
            )
            self.rows, self.samples, self.correct = 0, 0, 0.0
            self.printed, self.since = row["step"], time.perf_counter()

    def evaluation(self, row: dict[str, Any]) -> None:
        self.print(
            f"epoch {row['epoch']:>3}  step {row['step']:>6}  {row['train_s']:7.1f} s  "
            f"{row['samples'] / max(row['train_s'], 1e-9):8.1f} samples/s  "
            f"val_loss {row['val_loss']:.4f}  val_accuracy {row['val_accuracy']:.4f}"
        )

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
