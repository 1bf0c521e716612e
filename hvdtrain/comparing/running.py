"""Runs what was planned, one run after the other, and shows how far the whole comparison is."""

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import in_minutes, with_noun
from hvdtrain.base.system.preempt import signals_unwind
from hvdtrain.base.world.load import beside_others
from hvdtrain.comparing.comparison_state import ComparisonState
from hvdtrain.comparing.earlier import match, set_aside
from hvdtrain.comparing.forecast import expected_seconds, total_seconds
from hvdtrain.comparing.grid import Planned, in_rounds
from hvdtrain.comparing.progress import Progress
from hvdtrain.comparing.rates import find_rates, groups, trials_of, with_found_rates
from hvdtrain.comparing.report_command import import_for_report
from hvdtrain.comparing.search import Search
from hvdtrain.comparing.selection import contenders_to_repeat, contenders_to_train
from hvdtrain.comparing.settings import sides
from hvdtrain.launch.forking import can_be_forked, fork_server
from hvdtrain.launch.job_log import failure_reason
from hvdtrain.launch.prepare import TrainingJob, prepare
from hvdtrain.launch.processes import ends_late, launched_job, still_runs
from hvdtrain.reporting.answer import Answer, reach_answer
from hvdtrain.reporting.comparisons import split_into_comparisons
from hvdtrain.reporting.conduct import BY_SPEED, Conduct
from hvdtrain.reporting.contenders import DEFAULT, Margins
from hvdtrain.reporting.rule import LOOKS
from hvdtrain.runs.folder import has_full_disk
from hvdtrain.runs.read import Run, load_run

# The seconds that repeats may take which nobody asked for: see Comparison.most_repeats.
MORE_S = 90.0


def reach_answers(
    runs: Iterable[Run], margins: Margins, decided_by: str = BY_SPEED
) -> list[Answer]:
    """Returns the answers of the comparisons that these runs are; empty if there are no runs."""
    comparisons = split_into_comparisons(list(runs))
    conduct = Conduct(decided_by=decided_by)
    return [reach_answer(compared.runs, margins, conduct) for compared in comparisons]


def _why_enough(answers: Sequence[Answer]) -> str:
    """Returns why no more repeats are needed for these answers; empty if they are."""
    compared = [answer for answer in answers if answer.compares]
    if answers and not compared:
        return "there is nothing to compare"
    if compared and all(answer.is_known for answer in compared):
        return "the answer is known"
    return ""


class Comparison:
    """The runs of a comparison: does them, and tells how far it is.

    Args:
        folder: the comparison's folder.
        contenders: see grid.plan.
        earlier: the finished runs of the folder, see earlier.find_finished. They stay as they are.
        state: of the same folder.
        sprint_s: how long a sprint lasts; 0 if all runs are whole runs.
        repeats: how often each contender is repeated.
        number_of_trainings: how many whole runs of each mathematics follow the sprints; None for
            one, and a second if the answer hangs on it.
        search: leaves out some contenders first; None if all are repeated.
        decided_by: what decides: see Conduct.
        looks_for_rates: whether the learning rate of each mathematics is looked for first.
        given: options on the command line, which that search does not vary.
        most_repeats: how often each contender is repeated at most, where the answer is not known
            after `repeats` and more repeats take less than MORE_S. 0: `repeats`.

    Attributes:
        number_of_trainings: how many whole runs of each mathematics there are.
        may_train_again: whether one more of each follows if the answer hangs on it.
        progress: which runs are done, failed or left.
        search: as given; None once it is over.
    """

    def __init__(
        self,
        folder: Path,
        contenders: Sequence[Planned],
        earlier: Mapping[Hashable, Run],
        state: ComparisonState,
        sprint_s: float,
        repeats: int,
        number_of_trainings: int | None,
        search: Search | None = None,
        decided_by: str = BY_SPEED,
        looks_for_rates: bool = False,
        given: Collection[str] = (),
        most_repeats: int = 0,
    ) -> None:
        self.folder = folder
        self.contenders = with_found_rates(contenders, state) if looks_for_rates else contenders
        self.state = state
        self.sprint_s = sprint_s
        self.repeats = repeats
        self.most_repeats = max(repeats, most_repeats)
        self.number_of_trainings = 1 if number_of_trainings is None else number_of_trainings
        self.may_train_again = number_of_trainings is None
        self.search = search
        self.decided_by = decided_by
        self.looks_for_rates = looks_for_rates
        self.given = given
        kept = match(earlier, self._all_possible_runs(), folder)
        self.progress = Progress(kept, finished={run.name: run for run in earlier.values()})
        self._began = time.monotonic()
        self._bar: Any = None
        # What ends with the comparison.
        self._resources = contextlib.ExitStack()
        # The socket of the process that forks ranks; None if it is not started.
        self._fork_server: str | None = None

    # Which runs there are

    def runs(self) -> list[Planned]:
        """Returns all runs, also finished ones, as far as they are known."""
        contenders = self._expected_contenders()
        repeats = itertools.chain(*self._rounds(contenders, self.repeats))
        whole_runs = self._whole_runs(contenders, range(1, self.number_of_trainings + 1))
        return [*repeats, *whole_runs]

    def sprints_left(self) -> list[Planned]:
        """Returns the sprints that the search is sure to make, and has not made yet."""
        if not self.search:
            return []
        return self.progress.sprints_left(self.search.certain_sprints(self.contenders, self.state))

    @property
    def has_search_left(self) -> bool:
        """Whether a search has settings to try, or is trying them."""
        if not self.search:
            return False
        return bool(self.search.settings_to_try(self.contenders, self.state))

    def trials_left(self) -> list[Planned]:
        """Returns about the trainings that are to find learning rates, as far as none was found."""
        if not self.looks_for_rates:
            return []
        trials: list[Planned] = []
        for group in groups(self._expected_contenders()):
            if not any(map(self.state.found_rate, group)):
                trials += trials_of(group)
        return trials

    def possible_whole_runs(self) -> list[Planned]:
        """Returns the whole runs that follow if the answer hangs on them."""
        if not self.may_train_again:
            return []
        return self._whole_runs(self._expected_contenders(), [self.number_of_trainings + 1])

    def possible_repeats(self) -> list[Planned]:
        """Returns about the repeats that follow if the answer is not known: see _repeat_more."""
        contenders = self._expected_contenders()
        possible: list[Planned] = []
        for look in self._further_looks():
            rounds = self._rounds(contenders, look)[self.repeats :]
            runs = self.progress.left([*itertools.chain(*rounds)])
            if total_seconds(runs, self.state) > MORE_S:
                break
            possible = runs
        return possible

    def _further_looks(self) -> list[int]:
        """Returns the numbers of repeats, beyond `repeats`, after which the answer is looked at."""
        return [look for look in LOOKS if self.repeats < look <= self.most_repeats]

    def _left(self) -> list[Planned]:
        """Returns the runs that are left to do, as far as they are known."""
        to_try = [*self.sprints_left(), *self.trials_left()]
        return [*to_try, *self.progress.left(self.runs())]

    def _expected_contenders(self) -> list[Planned]:
        """Returns the contenders that are repeated, as far as the search has decided."""
        contenders = contenders_to_repeat(self.contenders, self.state)
        return self.search.expected_to_stay(contenders, self.state) if self.search else contenders

    def _rounds(self, contenders: Sequence[Planned], repeats: int) -> list[list[Planned]]:
        """Returns the runs of each repeat."""
        if self.sprint_s:
            contenders = [run.sprint(self.sprint_s) for run in contenders]
        return in_rounds(contenders, repeats)

    def _whole_runs(self, contenders: Sequence[Planned], numbers: Iterable[int]) -> list[Planned]:
        """Returns the whole runs with these numbers, which follow the sprints."""
        chosen = contenders_to_train(contenders, self.state, self.progress.done)
        whole_runs: list[Planned] = []
        for number in numbers:
            whole_runs += [run.as_repeat(number) for run in chosen]
        return whole_runs

    def _all_possible_runs(self) -> list[Planned]:
        """Returns each run that there may be, whatever the search decides."""
        numbers = range(1, self.number_of_trainings + self.may_train_again + 1)
        runs = list(itertools.chain(*self._rounds(self.contenders, self.most_repeats)))
        for run in self.contenders:
            whole_run = dataclasses.replace(run, after_sprints=True)
            runs += [whole_run.as_repeat(number) for number in numbers]
        return runs

    # Doing all runs

    def run(
        self, secrets: Mapping[str, str], margins: Margins = DEFAULT, until_sure: bool = False
    ) -> list[str]:
        """Does the runs that are not finished yet: the search, then the repeats and whole runs.

        Args:
            secrets: variables for every rank that no command line may show.
            margins: the smallest differences that matter.
            until_sure: whether to end with the repeat after which the answer is known.

        Returns:
            The names of the runs that failed.
        """
        from hvdtrain.base.console import Console, bar

        self.console = Console(soft_wrap=not sys.stdout.isatty())
        self.secrets = secrets
        self.state.save()
        kept = self.progress.kept
        if kept:
            self.console.print(f"there already, and left as it is: {with_noun(len(kept), 'run')}")
        shown = bar(self.console) if self.console.is_terminal else contextlib.nullcontext()
        with shown as self._bar, signals_unwind(), self._resources:
            self._task = self._bar and self._bar.add_task("", total=None)
            if self.search:
                self._run_search(self.search)
            if self.looks_for_rates:
                self._find_rates()
            self._run_repeats(margins, until_sure)
        return list(self.progress.failed)

    def _run_search(self, search: Search) -> None:
        """Does the search, and after a long one writes each side's best options."""
        for line in search.run(self.contenders, self.state, self._do):
            self.console.print(line)
        self.search = None
        if search.seconds:
            self._write_best()

    def _write_best(self) -> None:
        """Writes the options of each side's fastest setting, for --config and --preset."""
        repeated = contenders_to_repeat(self.contenders, self.state)
        for name, settings in sides(repeated).items():
            best = max(settings, key=self.state.speed)
            best.config.write(self.folder / f"tuned-{name}.toml", workers=best.workers)

    def _find_rates(self) -> None:
        """Finds the learning rate of each mathematics, at which its contenders are repeated."""
        contenders = contenders_to_repeat(self.contenders, self.state)
        for rate in find_rates(contenders, self.state, self._train_for_rate, self.given):
            self.console.print(f"learning rate of {', '.join(rate.of)}: {rate.words}")
        self.contenders = with_found_rates(self.contenders, self.state)

    def _train_for_rate(self, planned: Planned, name: str) -> Run | None:
        """Does a training of the search for learning rates, in `rates/`.

        Args:
            planned: the training.
            name: of its rate and settings, for its folder.

        Returns:
            The finished training, which an earlier call may have done; None if it failed.
        """
        run = planned.with_variant(f"{planned.variant}-{name}")
        out = self.folder / "rates" / run.name
        if (out / "summary.json").is_file():
            return load_run(out)
        set_aside(self.folder, out)
        self.progress.started += 1
        began = time.monotonic()
        expected_end = began + expected_seconds(planned, self.state)
        left_s = total_seconds(self._left(), self.state)
        finished = self._finish(run, out, lambda: self._show(run.name, expected_end, left_s))
        if isinstance(finished, str):
            self.console.print(f"tried first: {run.name}: FAILED: {finished}")
            return None
        took_s = time.monotonic() - began
        summary = finished.summary
        speed = summary.samples_per_s or 0.0
        self.state.note_finished(planned, speed, took_s, summary.samples or 0.0)
        self.console.print(f"tried first: {run.name}: {_result(finished)}, {took_s:.0f} s in all")
        return finished

    def _run_repeats(self, margins: Margins, until_sure: bool) -> None:
        """Does the repeats and, after as many as an answer needs, the whole runs."""
        contenders = contenders_to_repeat(self.contenders, self.state)
        for number, runs in enumerate(self._rounds(contenders, self.repeats), 1):
            self._do_undisturbed(runs, most=len(contenders) * self.repeats)
            if number == min(LOOKS[0], self.repeats):
                self._do(self._whole_runs(contenders, range(1, self.number_of_trainings + 1)))
            is_look = number in LOOKS and (until_sure or self.may_train_again)
            why_enough = self._why_enough(margins) if is_look else ""
            if why_enough and until_sure and number < self.repeats:
                self.console.print(f"{why_enough} after {number} repeats")
                break
        self._repeat_more(contenders, margins)

    def _repeat_more(self, contenders: Sequence[Planned], margins: Margins) -> None:
        """Repeats up to the next looks, until the answer is known or MORE_S are spent."""
        began = time.monotonic()
        for look in self._further_looks():
            if self.progress.failed:
                return
            answers = self._look(margins)
            if _why_enough(answers):
                return
            if not any(answer.is_told_by_repeats(look - 1) for answer in answers):
                return
            rounds = self._rounds(contenders, look)[self.repeats :]
            left = self.progress.left([*itertools.chain(*rounds)])
            if time.monotonic() - began + total_seconds(left, self.state) > MORE_S:
                return
            if left:
                self.console.print(
                    f"the answer is not known after {with_noun(self.repeats, 'repeat')}: "
                    f"{len(rounds)} more follow"
                )
            self.repeats = look
            for runs in rounds:
                self._do_undisturbed(runs, most=len(contenders) * look)

    def _why_enough(self, margins: Margins) -> str:
        """Looks at the answers so far, and returns why no more repeats are needed; empty if they
        are.
        """
        return _why_enough(self._look(margins))

    def _look(self, margins: Margins) -> list[Answer]:
        """Returns the answers so far. If one hangs on a second training, that is done first."""
        answers = self._answers(margins)
        if self.may_train_again and any(answer.hangs_on_training for answer in answers):
            self._train_again()
            answers = self._answers(margins)
        return answers

    def _answers(self, margins: Margins) -> list[Answer]:
        return reach_answers(self.progress.finished.values(), margins, self.decided_by)

    def _train_again(self) -> None:
        """Does one more whole run of each mathematics."""
        whole_runs = self.possible_whole_runs()
        self.may_train_again = False
        self.number_of_trainings += 1
        self.console.print(
            "what is faster is not shown to learn as much by one training: another follows"
        )
        self._do(whole_runs)

    def _do(self, runs: Sequence[Planned], place: str = "runs") -> dict[str, float]:
        """Does the runs that are not finished yet.

        Args:
            runs: the runs.
            place: where their folders are in the comparison's folder. Elsewhere than in `runs` they
                are sprints of the search.

        Returns:
            The samples/s of each contender that was run, 0 if it failed.
        """
        speeds = {}
        for run in runs:
            is_done = place == "runs" and run.name in self.progress.kept
            if not is_done and self.progress.is_to_start(run):
                speeds[run.contender] = self._run_one(run, self.folder / place / run.name)
        return speeds

    # Sprints beside other work

    def _do_undisturbed(self, runs: Sequence[Planned], most: int) -> None:
        """Does the runs of a repeat. Sprints beside other work of their hosts are done again.

        They are set aside for that alone, whatever their speed.

        Args:
            runs: the runs.
            most: how many sprints of the whole comparison are set aside at most. Later sprints
                count as they are.
        """
        self._do(runs)
        sprints = [run for run in runs if run.config.sprint and run.name in self.progress.made]
        while True:
            disturbed = [run for run in sprints if self._other_work(run)]
            # An earlier call may have had more repeats, and set aside more than `most`.
            number = max(0, most - len(self.state.disturbed))
            again = disturbed[:number]
            if not again or self.progress.shared_reason:
                return
            for run in again:
                self._set_disturbed_aside(run)
            self.console.print(
                f"{with_noun(len(again), 'sprint')} beside other work: set aside, and run again"
            )
            self._do(again)

    def _other_work(self, run: Planned) -> str:
        """Returns what else the hosts did while a run sprinted; empty if it does not matter."""
        finished = self.progress.finished.get(run.name)
        return "; ".join(beside_others(finished.summary.load)) if finished else ""

    def _set_disturbed_aside(self, run: Planned) -> None:
        """Moves a sprint out of the runs that count."""
        number = self.state.note_disturbed(run, self._other_work(run))
        aside = self.folder / "disturbed" / f"{run.name}-{number}"
        aside.parent.mkdir(exist_ok=True)
        (self.folder / "runs" / run.name).rename(aside)
        self.progress.set_aside(run)

    # Doing one run

    def _run_one(self, run: Planned, out: Path) -> float:
        """Does a run, and tells what came of it.

        Returns:
            Its samples/s, or 0 if it failed.
        """
        unfinished = set_aside(self.folder, out)
        if unfinished:
            self.console.print(f"{run.name}: what an earlier start had left is in {unfinished}")
        is_of_search = out.parent.name != "runs"
        if is_of_search:
            self.progress.start_sprint(run)
        else:
            self.progress.start(run)
        left = self._left()
        left_s = total_seconds(left, self.state)
        number = self.progress.started
        label = f"[{number}/{number + len(left)}] {run.name}"
        began = time.monotonic()
        expected_end = began + expected_seconds(run, self.state)
        finished = self._finish(run, out, lambda: self._show(label, expected_end, left_s))
        if isinstance(finished, str):
            self._tell_failure(run, label, finished)
            return 0.0
        took_s = time.monotonic() - began
        summary = finished.summary
        speed = summary.samples_per_s or 0.0
        if is_of_search:
            self.state.note_sprint(run, speed, summary.wall_s or 0.0)
        else:
            self.progress.finished[run.name] = finished
        self.state.note_finished(run, speed, took_s, summary.samples or 0.0)
        rest = f"; about {in_minutes(total_seconds(left, self.state))} left" if left else ""
        self.console.print(f"{label}: {_result(finished)}, {took_s:.0f} s in all{rest}")
        return speed

    def _tell_failure(self, run: Planned, label: str, reason: str) -> None:
        """Tells and notes that a run failed. A setting that nobody asked for is left out."""
        if run.is_extra:
            self.state.leave_out(run, f"it failed: {reason}")
            self.console.print(f"{label}: left out, it failed: {reason}")
            return
        self.progress.fail(run, reason, has_worked=self.state.has_speeds)
        if self.progress.shared_reason:
            self.state.forget_contenders()  # settings that were left out may work another time
        full = "; the disk is full" if has_full_disk(self.folder) else ""
        self.console.print(f"{label}: FAILED: {reason}{full}")

    def _show(self, label: str, expected_end: float, left_s: float) -> None:
        """Shows how far the comparison is.

        Args:
            label: names the current run.
            expected_end: when the current run ends, by time.monotonic.
            left_s: how long the runs after it take.
        """
        if not self._bar:
            return
        now = time.monotonic()
        spent_s = now - self._began
        total_s = spent_s + max(0.0, expected_end - now) + left_s
        self._bar.update(
            self._task, description=label, total=round(total_s), completed=round(spent_s)
        )

    def _finish(self, run: Planned, out: Path, show: Callable[[], None]) -> Run | str:
        """Does a run to its end.

        Args:
            run: the run.
            out: its folder.
            show: is called all the while.

        Returns:
            The finished run, or the reason if it failed.

        Raises:
            UsageError: not even the first run can be started as asked.
        """
        out = out.absolute()
        log = self.folder / "logs" / f"{run.name}.log"
        summary = out / "summary.json"
        # Measuring the network takes some seconds.
        measure = run.config.repeat == 1 or not run.config.sprint
        training = TrainingJob(
            run.config,
            run.workers,
            run.hosts,
            out,
            secrets=self.secrets,
            fork_server=self._fork_server_for(run),
        )
        try:
            command = prepare(run.launcher, training, measure=measure)
        except UsageError as error:
            if self.progress.started == 1 and not self.progress.kept:
                raise
            # A host is down that was up.
            return str(error)
        with launched_job(command, log) as job:
            is_late = ends_late(summary)
            while still_runs(job) and not is_late():
                show()
            code = job.returncode or 0
        if code or not summary.is_file():
            return failure_reason(log, code)
        finished = load_run(out)
        if finished.problem:
            return f"{finished.problem}: the report leaves it out"
        return finished

    def _fork_server_for(self, run: Planned) -> str:
        """Returns the socket of the process that the run's ranks are forked from, or empty.

        The process is started for the first run that can use it, and serves the later ones.
        """
        if not can_be_forked(run.launcher, run.config):
            return ""
        if self._fork_server is None:
            log = self.folder / "logs" / "fork_server.log"
            server = fork_server(log, meanwhile=import_for_report)
            self._fork_server = self._resources.enter_context(server)
        return self._fork_server


def _result(run: Run) -> str:
    """Returns what came of a run, in words."""
    summary = run.summary
    words = f"{summary.samples_per_s:.0f} samples/s"
    if summary.val_loss is not None and summary.val_accuracy is None:
        words += f", loss {summary.val_loss:.4g}"
    elif summary.val_accuracy is not None and summary.val_loss is None:
        words += f", accuracy {summary.val_accuracy:.4f}"
    elif summary.val_loss is not None and math.isfinite(summary.val_loss):
        words += f", validation accuracy {summary.val_accuracy:.4f}"
    elif summary.val_loss is not None:
        words += f", DIVERGED: validation loss {summary.val_loss}"
    disturbances = beside_others(summary.load)
    if disturbances:
        words += f", beside other work: {disturbances[0]}"
    if len(disturbances) > 1:
        words += f", and {with_noun(len(disturbances) - 1, 'more host')} so"
    return words
