"""Runs what was planned, one run after the other, and shows how far the whole comparison is."""

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.compare.earlier import match, set_aside
from hvdtrain.compare.forecast import Record, in_minutes
from hvdtrain.compare.grid import Planned, in_rounds
from hvdtrain.compare.pilot import PILOT_S, leave_out, needs_pilot, taken, trainings
from hvdtrain.config.untrusted import parse_json
from hvdtrain.formatting import with_noun
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.prepare import prepare
from hvdtrain.launch.processes import launched_job, sigterm_unwinds
from hvdtrain.report.rule import LOOKS
from hvdtrain.runs.folder import has_full_disk
from hvdtrain.world.load import beside_others

END_AFTER_SUMMARY_S = 30.0  # how long the ranks of a job may take to end after its summary is written


class Comparison:
    """The runs of a comparison, which are left to do, and how far they are.

    Args:
        contenders: see grid.plan.
        earlier: finished runs of the same folder, which stay as they are.
        record: of the same folder.
        sprint_s: how long a sprint lasts; 0: all are whole runs.
        trainings: how many whole runs follow the sprints, of each mathematics.
    """

    def __init__(
        self, folder: Path, contenders: Sequence[Planned], earlier: Mapping[Hashable, Path], record: Record,
        sprint_s: float, repeats: int, trainings: int,
    ) -> None:  # fmt: skip
        self.folder, self.contenders, self.sprint_s, self.repeats = folder, contenders, sprint_s, repeats
        self.numbers, self.record = range(1, trainings + 1), record
        whole = [dataclasses.replace(run, beside_sprints=True).again(n) for run in contenders for n in self.numbers]
        self.kept = match(earlier, [*itertools.chain(*self._rounds(contenders)), *whole], folder)
        self.made: list[str] = []  # names of runs, in this call
        self.failed: dict[str, str] = {}  # contenders by names of runs: they are not tried again
        self.began = time.monotonic()
        self.progress: Any = None

    def runs(self) -> list[Planned]:
        """All of them, those too that are there, as far as it is known."""
        contenders = taken(self.contenders, self.record)
        return [*itertools.chain(*self._rounds(contenders)), *self._trainings(contenders)]

    def pilots(self) -> list[Planned]:
        """Sprints of those contenders of which it is open whether they are worth it."""
        return [run.sprint(PILOT_S) for run in needs_pilot(self.contenders, self.record)] if self.sprint_s else []

    def run(self, secrets: Mapping[str, str], is_settled: Callable[[int], bool], until_sure: bool) -> list[str]:
        """Do those that are not finished yet; return the names of those that failed.

        Args:
            secrets: variables for every rank that no command line may show.
            is_settled: whether the repeats up to this one are enough, asked after each if `until_sure`.
        """
        from hvdtrain.console import Console
        from hvdtrain.progress_bars import bar

        self.console, self.secrets = Console(soft_wrap=not sys.stdout.isatty()), secrets
        self.record.save()
        if self.kept:
            self.console.print(f"{len(self.kept)} runs are there already, and stay as they are")
        shown = bar(self.console) if self.console.is_terminal else contextlib.nullcontext()
        with shown as self.progress, sigterm_unwinds():
            self.task = self.progress and self.progress.add_task("", total=None)
            self._do(self.pilots(), "pilot")
            for line in leave_out(self.contenders, self.record) if self.sprint_s else ():
                self.console.print(line)
            self.record.save()
            contenders = taken(self.contenders, self.record)
            for number, runs in enumerate(self._rounds(contenders), 1):
                self._do(runs)
                if number == min(LOOKS[0], self.repeats):
                    self._do(self._trainings(contenders))
                if until_sure and number < self.repeats and is_settled(number):
                    self.console.print(f"the answer is known after {number} repeats")
                    break
        return list(self.failed)

    def _rounds(self, contenders: Sequence[Planned]) -> list[list[Planned]]:
        return in_rounds([run.sprint(self.sprint_s) if self.sprint_s else run for run in contenders], self.repeats)

    def _trainings(self, contenders: Sequence[Planned]) -> list[Planned]:
        chosen = trainings(contenders, self.record, self.kept) if self.numbers else []
        return [run.again(number) for number in self.numbers for run in chosen]

    def _do(self, runs: Sequence[Planned], place: str = "runs") -> None:
        """Do those that are not finished yet; place: the folder's folder that they go to."""
        for run in runs:
            if run.contender not in self.failed.values() and (run.name not in self.kept or place != "runs"):
                self._run_one(run, self.folder / place / run.name)

    def _run_one(self, run: Planned, out: Path) -> None:
        """Do a run, and tell what came of it."""
        if place := set_aside(self.folder, out):
            self.console.print(f"{run.name}: what an earlier start had left is in {place}")
        self.made.append(run.name if out.parent.name == "runs" else "")
        left = [other for other in self._left() if other != run]
        label, began = f"[{len(self.made)}/{len(self.made) + len(left)}] {run.name}", time.monotonic()
        until, left_s = began + self.record.seconds(run), sum(map(self.record.seconds, left))
        problem = self._finish(run, out, lambda: self._show(label, until, left_s))
        if problem:
            self.failed[run.name] = run.contender
            full = "; the disk is full" if has_full_disk(self.folder) else ""
            self.console.print(f"{label}: FAILED: {problem}{full}")
            return
        took, summary = time.monotonic() - began, parse_json((out / "summary.json").read_text())
        self.record.finished(run, summary["samples_per_s"], took)
        words = f"; {in_minutes(sum(map(self.record.seconds, left)))} left" if left else ""
        self.console.print(f"{label}: {_result(summary)}, {took:.0f} s in all{words}")

    def _left(self) -> list[Planned]:
        done = {*self.kept, *self.made}
        runs = [*self.pilots(), *(run for run in self.runs() if run.name not in done)]
        return [run for run in runs if run.contender not in self.failed.values()]

    def _show(self, label: str, until: float, left_s: float) -> None:
        """Show how far the comparison is: this run until about then, and others after it."""
        if self.progress:
            left, spent = left_s + max(0.0, until - time.monotonic()), time.monotonic() - self.began
            self.progress.update(self.task, description=label, total=round(spent + left), completed=round(spent))

    def _finish(self, run: Planned, out: Path, show: Callable[[], None]) -> str:
        """Do a run to its end; return the reason if it failed. `show` is called all the while."""
        out, log = out.absolute(), self.folder / "logs" / f"{run.name}.log"
        summary = out / "summary.json"
        measure = run.config.repeat == 1 or not run.config.sprint  # the network, which takes some seconds
        command = prepare(run.launcher, run.config, run.workers, run.hosts, out, measure=measure, secrets=self.secrets)
        with launched_job(command, log) as job:
            # A worker that hangs and was given up by the others would let its starter wait for ever.
            while job.poll() is None and not (
                summary.is_file() and time.time() - summary.stat().st_mtime > END_AFTER_SUMMARY_S
            ):
                show()
                time.sleep(0.1)
            code = job.returncode or 0
        if code or not summary.is_file():
            return failure_reason(log, code)
        lost = parse_json(summary.read_text())["lost_workers"]
        return f"it finished without ranks {lost}, which died on the way: the report leaves it out" if lost else ""


def _result(summary: Mapping[str, Any]) -> str:
    loss, learned = summary["val_loss"], ""
    if loss is not None:
        accuracy = f", validation accuracy {summary['val_accuracy']:.4f}"
        learned = accuracy if math.isfinite(loss) else f", DIVERGED: validation loss {loss}"
    others = beside_others(summary.get("load") or {})
    more = f", and {with_noun(len(others) - 1, 'more host')} so" if len(others) > 1 else ""
    beside = f", beside other work: {others[0]}{more}" if others else ""
    return f"{summary['samples_per_s']:.0f} samples/s{learned}{beside}"
