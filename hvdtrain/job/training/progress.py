"""The progress of training, for a person: a bar on a terminal, a line for each epoch elsewhere."""

import sys
import time
from typing import Any, TextIO

from rich.progress import Progress, TaskID

from hvdtrain.base.console import Console, bar


class TrainingProgress:
    """The progress of training, which only the worker that leads shows.

    Args:
        out: where to print.
        steps: the number of steps of the job; None where time decides.
        shown: whether this worker leads.
        log_every: prints samples/s and accuracy every so many steps; 0 for never.
        workers: the number of workers, which samples/s are of.
        first_step: the step of the snapshot that training goes on from, or 0.
    """

    def __init__(
        self,
        out: TextIO,
        steps: int | None,
        shown: bool,
        log_every: int,
        workers: int,
        first_step: int = 0,
    ) -> None:
        self.log_every_if_shown = log_every
        self.log_every = log_every if shown else 0
        self.workers = workers
        self.printed = first_step  # the last step that was printed
        self._begin_line()
        self.console = Console(file=out, quiet=not shown)
        self.bar: Progress | None = None
        self.task = TaskID(0)
        if shown and self.console.is_terminal and sys.stderr.isatty():
            self.bar = bar(self.console)
            self.task = self.bar.add_task("training", total=steps)
            self.bar.start()

    def _begin_line(self) -> None:
        """Counts for the next line from here."""
        self.rows = 0
        self.samples = 0
        self.correct = 0.0
        self.since = time.perf_counter()

    def lead(self) -> None:
        """Shows the progress from now on, on the worker that leads now."""
        self.log_every = self.log_every_if_shown
        self.console.quiet = False

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
            # This worker may have had more or fewer leased shares than one for each step.
            samples_per_step = self.workers * self.samples / self.rows
            of_all = samples_per_step * (row["step"] - self.printed)
            rate = of_all / (time.perf_counter() - self.since)
            self.print(
                f"epoch {row['epoch']:>3}  step {row['step']:>6}  {rate:8.1f} samples/s  "
                f"accuracy {self.correct / max(1, self.samples):.4f}"
            )
            self.printed = row["step"]
            self._begin_line()

    def evaluation(self, row: dict[str, Any]) -> None:
        self.print(
            f"epoch {row['epoch']:>3}  step {row['step']:>6}  {row['train_s']:7.1f} s  "
            f"{row['samples'] / max(row['train_s'], 1e-9):8.1f} samples/s  "
            f"val_loss {row['val_loss']:.4f}  val_accuracy {row['val_accuracy']:.4f}"
        )

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
