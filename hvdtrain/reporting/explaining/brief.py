"""What is known of a run that has too few steps to be explained."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.base.console import Console
from hvdtrain.reporting.explaining.timeline import FEWEST_STEPS, TooFewSteps
from hvdtrain.reporting.rule import half_width_of_mean
from hvdtrain.runs.command_lines import longer_command, with_placeholders
from hvdtrain.runs.live import metrics_file
from hvdtrain.runs.read import Run, load_run
from hvdtrain.runs.schema import Step, each_share, read_steps

# Steps after the first, with fewer of which nothing is said.
FEWEST_OF_BRIEF = 3
# The part of all cases in which the mean lies in its interval.
SURE = 0.9


@dataclass(frozen=True)
class Brief:
    """The mean step of a run, with intervals of 90 % for the mean.

    Attributes:
        steps: that were counted, of each worker.
        computed_s, waited_s, step_s: mean, low and high.
    """

    run: Run
    steps: int
    computed_s: tuple[float, float, float]
    waited_s: tuple[float, float, float]
    step_s: tuple[float, float, float]

    @property
    def title(self) -> str:
        return f"{self.run.name}: {self.run.kind.label}"

    @property
    def data(self) -> dict[str, Any]:
        """The object of this run in the file of --json."""
        figures = {
            name: {"mean": mean, "low": low, "high": high}
            for name, (mean, low, high) in self._figures().items()
        }
        return {
            "run": str(self.run.folder),
            "mode": self.run.kind.mode,
            "workers": self.run.kind.workers,
            "servers": self.run.kind.servers,
            "counted_steps": self.steps,
            "samples_per_s": self.run.summary.samples_per_s,
            "command": self.command,
        } | figures

    @property
    def command(self) -> str:
        """The command that trains for long enough."""
        return with_placeholders(longer_command(self.run, FEWEST_STEPS))

    def _figures(self) -> dict[str, tuple[float, float, float]]:
        return {"step_s": self.step_s, "computing_s": self.computed_s, "waiting_s": self.waited_s}

    def show(self, console: Console) -> None:
        """Prints the figures, and the command."""
        speed = self.run.summary.samples_per_s or 0
        console.print(f"{self.title}, {speed:,.0f} samples/s", style="bold")
        for name, (mean, low, high) in self._figures().items():
            words = name.removesuffix("_s")
            console.print(
                f"{words}: {1e3 * mean:,.0f} ms ({1e3 * low:,.0f} to {1e3 * high:,.0f}), the mean of "
                f"{self.steps} steps after the first"
            )
        console.print(
            f"These steps are too few to say what the workers waited for: {FEWEST_STEPS} are needed. "
            "For a longer run:\n"
            f"{self.command}",
            soft_wrap=True,
        )


def brief(folder: Path, too_few: TooFewSteps) -> Brief:
    """Returns what a run says that has too few steps to be explained.

    Raises:
        TooFewSteps: there are hardly any of some worker, or the run had enough.
    """
    run = load_run(folder)
    if (run.summary.steps or 0) >= FEWEST_STEPS:
        raise too_few
    computed_s = []
    waited_s = []
    for rank in range(run.kind.servers, run.kind.servers + run.kind.workers):
        shares, _ = read_steps(metrics_file(folder, rank))
        counted = each_share(shares)[1:]
        if len(counted) < FEWEST_OF_BRIEF:
            raise too_few
        computed_s.append([_computed_s(step) for step in counted])
        waited_s.append([step.comm_s + step.barrier_s + step.lease_s for step in counted])
    steps = min(map(len, computed_s))
    computed = np.mean([seconds[:steps] for seconds in computed_s], axis=0)
    waited = np.mean([seconds[:steps] for seconds in waited_s], axis=0)
    return Brief(run, steps, _mean(computed), _mean(waited), _mean(computed + waited))


def _computed_s(step: Step) -> float:
    return step.data_s + step.forward_s + step.backward_s + step.optimizer_s + step.metrics_s


def _mean(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean, and Student's interval for it, which ends at 0."""
    mean = float(np.mean(seconds))
    half = half_width_of_mean(seconds, 1 - SURE)
    return mean, max(0.0, mean - half), mean + half
