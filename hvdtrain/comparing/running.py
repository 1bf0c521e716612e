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

from hvdtrain.comparing.earlier import match, set_aside
from hvdtrain.comparing.forecast import Record
from hvdtrain.comparing.grid import Planned, in_rounds
from hvdtrain.comparing.pilot import PILOT_S, Rivalry, leave_out, needs_pilot, taken, trainings
from hvdtrain.comparing.tune import search, sides, tuned
from hvdtrain.errors import UsageError
from hvdtrain.formatting import in_minutes, with_noun
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.prepare import prepare
from hvdtrain.launch.processes import ends_late, launched_job, sigterm_unwinds
from hvdtrain.report.answer import Answer, reach_answer
from hvdtrain.report.comparisons import split_into_comparisons
from hvdtrain.report.contenders import DEFAULT, Margins
from hvdtrain.report.rule import LOOKS
from hvdtrain.runs.folder import has_full_disk
from hvdtrain.runs.read import Run, find_runs, load_run
from hvdtrain.world.load import beside_others


def reach_answers(folder: Path, margins: Margins) -> list[Answer]:
    """The answers of the comparisons in the folder so far; none where nothing has finished."""
    with contextlib.suppress(UsageError):
        return [reach_answer(of.runs, margins) for of in split_into_comparisons(find_runs([folder]))]
    return []


class Comparison:
    """The runs of a comparison, which are left to do, and how far they are.

    Args:
        contenders: see grid.plan.
        earlier: finished runs of the same folder, which stay as they are.
        record: of the same folder.
        sprint_s: how long a sprint lasts; 0: all are whole runs.
        trainings: how many whole runs follow the sprints, of each mathematics; None: one, and a second where the answer
            hangs on it.
        rivalry: of which contenders a pilot leaves some out; None: of none.
        tune_s: of each side only the best counts, which is looked for first, for so long; 0: all do.
    """

    def __init__(
        self, folder: Path, contenders: Sequence[Planned], earlier: Mapping[Hashable, Path], record: Record,
        sprint_s: float, repeats: int, trainings: int | None, rivalry: Rivalry | None = None, tune_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.folder, self.contenders, self.sprint_s, self.repeats = folder, contenders, sprint_s, repeats
        self.record, self.trainings = record, 1 if trainings is None else trainings
        self.spare_training = trainings is None  # one more may be made
        whole = [dataclasses.replace(run, after_sprints=True) for run in contenders]
        numbers = range(1, self.trainings + self.spare_training + 1)
        repeated = [run.as_repeat(number) for run in whole for number in numbers]
        self.kept = match(earlier, [*itertools.chain(*self._rounds(contenders)), *repeated], folder)
        self.made: list[str] = []  # names of runs, in this call
        self.failed: dict[str, str] = {}  # contenders by names of runs: they are not tried again
        self.began = time.monotonic()
        self.progress: Any = None
        self.rivalry, self.tune_s, self.settings = rivalry, tune_s, contenders
        if tune_s:
            self.contenders = tuned(contenders, record)

    def runs(self) -> list[Planned]:
        """All of them, finished ones too, as far as it is known."""
        contenders = taken(self.contenders, self.record)
        numbers = range(1, self.trainings + 1)
        return [*itertools.chain(*self._rounds(contenders)), *self._trainings(contenders, numbers)]

    def pilots(self) -> list[Planned]:
        """Sprints of those contenders of which it is open whether they are worth it."""
        unknown = needs_pilot(self.contenders, self.record, self.rivalry) if self.rivalry else []
        return [run.sprint(PILOT_S) for run in unknown]

    def spare_trainings(self) -> list[Planned]:
        """Those that follow where the answer hangs on them."""
        return self._trainings(taken(self.contenders, self.record), [self.trainings + 1] if self.spare_training else [])

    def run(self, secrets: Mapping[str, str], margins: Margins = DEFAULT, until_sure: bool = False) -> list[str]:
        """Do those that are not finished yet; return the names of those that failed.

        Args:
            secrets: variables for every rank that no command line may show.
            until_sure: end with the repeat after which the answer is known.
        """
        from hvdtrain.console import Console, bar

        self.console, self.secrets = Console(soft_wrap=not sys.stdout.isatty()), secrets
        self.record.save()
        if self.kept:
            self.console.print(f"there already, and left as it is: {with_noun(len(self.kept), 'run')}")
        shown = bar(self.console) if self.console.is_terminal else contextlib.nullcontext()
        with shown as self.progress, sigterm_unwinds():
            self.task = self.progress and self.progress.add_task("", total=None)
            if self.tune_s:
                search(self.settings, self.record, self.tune_s, self._do)
                self.contenders = tuned(self.settings, self.record)
                for name, settings in sides(self.contenders).items():  # as --config and --preset take it
                    best = settings[0]
                    best.config.write(self.folder / f"tuned-{name}.toml", workers=best.workers)
            self._do(self.pilots(), "pilot")
            for line in leave_out(self.contenders, self.record, self.rivalry) if self.rivalry else ():
                self.console.print(line)
            self.record.save()
            contenders = taken(self.contenders, self.record)
            for number, runs in enumerate(self._rounds(contenders), 1):
                self._do(runs)
                if number == min(LOOKS[0], self.repeats):
                    self._do(self._trainings(contenders, range(1, self.trainings + 1)))
                is_asked = number in LOOKS and (until_sure or self.spare_training)
                if is_asked and self._is_settled(margins) and until_sure and number < self.repeats:
                    self.console.print(f"the answer is known after {number} repeats")
                    break
        return list(self.failed)

    def _is_settled(self, margins: Margins) -> bool:
        """Whether all answers are known; after a second training where one hangs on that."""
        answers = reach_answers(self.folder, margins)
        if self.spare_training and any(answer.hangs_on_training for answer in answers):
            spare = self.spare_trainings()
            self.spare_training, self.trainings = False, self.trainings + 1
            self.console.print("what is faster is not shown to learn as much by one training: another follows")
            self._do(spare)
            answers = reach_answers(self.folder, margins)
        return bool(answers) and all(answer.is_known for answer in answers)

    def _rounds(self, contenders: Sequence[Planned]) -> list[list[Planned]]:
        return in_rounds([run.sprint(self.sprint_s) if self.sprint_s else run for run in contenders], self.repeats)

    def _trainings(self, contenders: Sequence[Planned], numbers: Sequence[int]) -> list[Planned]:
        chosen = trainings(contenders, self.record, {*self.kept, *self.made}) if numbers else []
        return [run.as_repeat(number) for number in numbers for run in chosen]

    def _do(self, runs: Sequence[Planned], place: str = "runs") -> dict[str, float]:
        """Do those that are not finished yet; place: the folder's folder that they go to. The samples/s of each
        contender that was run, 0 where that failed.
        """
        return {
            run.contender: self._run_one(run, self.folder / place / run.name) for run in runs
            if run.contender not in self.failed.values() and (run.name not in self.kept or place != "runs")
        }  # fmt: skip

    def _run_one(self, run: Planned, out: Path) -> float:
        """Do a run, and tell what came of it: its samples/s, or 0."""
        if place := set_aside(self.folder, out):
            self.console.print(f"{run.name}: what an earlier start had left is in {place}")
        self.made.append(run.name if out.parent.name == "runs" else "")
        done, lost = {*self.kept, *self.made}, self.failed.values()
        left = [*self.pilots(), *(other for other in self.runs() if other.name not in done)]
        left = [other for other in left if other != run and other.contender not in lost]
        label, began = f"[{len(self.made)}/{len(self.made) + len(left)}] {run.name}", time.monotonic()
        until, left_s = began + self.record.seconds(run), sum(map(self.record.seconds, left))
        made = self._finish(run, out, lambda: self._show(label, until, left_s))
        if isinstance(made, str):
            self.failed[run.name] = run.contender
            full = "; the disk is full" if has_full_disk(self.folder) else ""
            self.console.print(f"{label}: FAILED: {made}{full}")
            return 0.0
        took = time.monotonic() - began
        self.record.finished(run, made.summary.samples_per_s or 0.0, took)
        words = f"; about {in_minutes(sum(map(self.record.seconds, left)))} left" if left else ""
        self.console.print(f"{label}: {_result(made)}, {took:.0f} s in all{words}")
        return made.summary.samples_per_s or 0.0

    def _show(self, label: str, until: float, left_s: float) -> None:
        """Show how far the comparison is: this run until about then, and others after it."""
        if self.progress:
            left, spent = left_s + max(0.0, until - time.monotonic()), time.monotonic() - self.began
            self.progress.update(self.task, description=label, total=round(spent + left), completed=round(spent))

    def _finish(self, run: Planned, out: Path, show: Callable[[], None]) -> Run | str:
        """Do a run to its end; what it left, or the reason if it failed. `show` is called all the while.

        Raises:
            UsageError: not even the first run can be started as asked.
        """
        out, log = out.absolute(), self.folder / "logs" / f"{run.name}.log"
        summary = out / "summary.json"
        measure = run.config.repeat == 1 or not run.config.sprint  # the network, which takes some seconds
        try:
            command = prepare(
                run.launcher, run.config, run.workers, run.hosts, out, measure=measure, secrets=self.secrets
            )
        except UsageError as error:  # a host is down that was up
            if len(self.made) == 1 and not self.kept:
                raise
            return str(error)
        with launched_job(command, log) as job:
            is_late = ends_late(summary)
            while job.poll() is None and not is_late():
                show()
                time.sleep(0.1)
            code = job.returncode or 0
        if code or not summary.is_file():
            return failure_reason(log, code)
        made = load_run(out)
        return f"{made.problem}: the report leaves it out" if made.problem else made


def _result(made: Run) -> str:
    summary, learned = made.summary, ""
    if summary.val_loss is not None:
        accuracy = f", validation accuracy {summary.val_accuracy:.4f}"
        learned = accuracy if math.isfinite(summary.val_loss) else f", DIVERGED: validation loss {summary.val_loss}"
    others = beside_others(summary.load)
    more = f", and {with_noun(len(others) - 1, 'more host')} so" if len(others) > 1 else ""
    foreign = f", beside other work: {others[0]}{more}" if others else ""
    return f"{summary.samples_per_s:.0f} samples/s{learned}{foreign}"
