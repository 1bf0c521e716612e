"""What a person sees while a job trains: a bar on a terminal, a line an epoch elsewhere."""

import sys
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class TrainingProgress:
    """Shown by the first worker alone.

    Args:
        out: where to print.
        steps: how many there will be, or None where time decides.
        shown: False on every other worker, which shows nothing.
    """

    def __init__(self, out: TextIO, steps: int | None, shown: bool) -> None:
        self.console = Console(file=out, highlight=False, quiet=not shown)
        self.bar: Progress | None = None
        self.task = TaskID(0)
        if shown and self.console.is_terminal and sys.stderr.isatty():
            self.bar = bar(self.console)
            self.task = self.bar.add_task("training", total=steps)
            self.bar.start()

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)

    def step(self, step: int) -> None:
        if self.bar:
            self.bar.update(self.task, completed=step)

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
