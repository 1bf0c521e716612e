"""Everything that `explain` says of a run: as figures, and for people."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.base.console import Console
from hvdtrain.base.errors import UsageError
from hvdtrain.reporting.explaining.account import (
    PARTS,
    Account,
    account,
    made_slow,
    waits_for_others,
)
from hvdtrain.reporting.explaining.straggler import Straggler, find_straggler, waited_for
from hvdtrain.reporting.explaining.timeline import COMPUTED, WAITED, Timeline, read_timeline
from hvdtrain.reporting.explaining.what_if import what_if
from hvdtrain.reporting.table import Table, print_table, words_table
from hvdtrain.runs.membership_log import LEFT
from hvdtrain.runs.read import Run, load_run, resumed_otherwise


@dataclass(frozen=True)
class Explained:
    """What the recorded steps of a run say.

    Attributes:
        run: the run.
        timeline: the steps.
        straggler: the worker that was slower than the others, if there was one.
        waited: seconds that the others waited for each rank; None if that is not known.
        account: where the time of a mean step went.
        rates: the samples/s that the run would have had without a straggler, with twice the
            bandwidth and so on, by the name of the change; None if that is not known.
    """

    run: Run
    timeline: Timeline
    straggler: Straggler | None
    waited: Mapping[int, float | None]
    account: Account
    rates: dict[str, float | None]

    @property
    def parts_of_round(self) -> dict[str, float]:
        """Seconds of each part of a round; empty without --local-steps."""
        local_steps = self.run.local_steps
        if local_steps <= 1:
            return {}
        return self.account.parts_of_round(local_steps, bool(self.run.kind.servers))

    @property
    def title(self) -> str:
        """The run's name and kind."""
        return f"{self.run.name}: {self.run.kind.label}"

    @property
    def data(self) -> dict[str, Any]:
        """The figures of this run, as `hvdtrain explain --json` writes them."""
        run = self.run
        straggler = self.straggler
        return {
            "run": str(run.folder),
            "mode": run.kind.mode,
            "workers": run.kind.workers,
            "servers": run.kind.servers,
            "straggler": straggler and straggler.rank,
            "factor": straggler and straggler.factor,
            "slow_from_s": straggler and straggler.since_s,
            "slow_until_s": straggler and straggler.until_s,
            "left_out": self.timeline.left_out,
            "absent_s": {str(rank): absences for rank, absences in self.timeline.absent.items()},
            "waited_s": {str(rank): seconds for rank, seconds in self.waited.items()},
            "step_s": self.account.step_s,
            "parts": self.account.parts,
            "unknown": self.account.unknown,
            "round": self.parts_of_round,
            "samples_per_s": run.summary.samples_per_s,
            "what_if": {name: {"samples_per_s": rate} for name, rate in self.rates.items()},
        }

    def show(self, console: Console) -> None:
        """Prints who was slow, what ranks did, the parts of a step, and what would be faster."""
        speed = self.run.summary.samples_per_s or 0
        console.print(f"{self.title}, {speed:,.0f} samples/s", style="bold")
        for line in self._sentences():
            console.print(line)
        print_table(console, self._table_of_ranks())
        print_table(console, self._table_of_parts())
        parts_of_round = self.parts_of_round
        if parts_of_round:
            parts = [
                f"{_in_words(name)} {_ms(seconds)}" for name, seconds in parts_of_round.items()
            ]
            local_steps = self.run.local_steps
            console.print(f"a round of {local_steps} steps, in ms: {', '.join(parts)}")
        for name, rate in self.rates.items():
            if name == "without_straggler" and not self.straggler:
                continue
            if rate:
                gain = rate / (speed or rate)
                console.print(f"{_in_words(name)}: {rate:,.0f} samples/s, {gain:.2f} times as many")

    def _table_of_ranks(self) -> Table:
        rows = []
        means_ms = 1000 * self.timeline.means
        for rank, mean_ms in zip(self.timeline.ranks, means_ms, strict=True):
            worker = rank - self.run.kind.servers
            waited_s = self.waited[rank]
            rows.append(
                [
                    str(rank),
                    str(worker),
                    f"{mean_ms[COMPUTED]:,.1f} ms",
                    f"{mean_ms[WAITED]:,.1f} ms",
                    "" if waited_s is None else f"{waited_s:,.1f} s",
                ]
            )
        headings = (
            "rank",
            "worker",
            "computes in a step",
            "waits in a step",
            "others waited for it",
        )
        return words_table("", headings, rows)

    def _table_of_parts(self) -> Table:
        account = self.account
        rows = []
        for name, seconds in account.parts.items():
            if name in account.unknown:
                rows.append([_in_words(name), "", "", account.unknown[name]])
            else:
                share = f"{seconds / account.step_s:.1%}"
                rows.append([_in_words(name), _ms(seconds), share, PARTS[name]])
        mean = "the mean of all steps that workers took"
        rows.append(["together", _ms(account.step_s), "100%", mean])
        return words_table("", ("part of a step", "ms", "share", "what it is"), rows)

    def _sentences(self) -> Iterator[str]:
        """Yields who was made slow, who was lost or left, and who was slow."""
        yield from self._sentences_of_slow()
        yield from self._sentences_of_gone()
        straggler = self.straggler
        if straggler:
            yield (
                f"Rank {straggler.rank} was slow, from {straggler.since_s:.1f} to "
                f"{straggler.until_s:.1f} s: its steps took {straggler.factor:.1f} times as long "
                f"as the others', who waited for it {self.waited[straggler.rank]:.1f} s."
            )
        elif len(self.timeline.ranks) > 1:
            yield (
                "No slow worker was found: nobody's steps took 1.5 times as long as the others' "
                "for a fifth of the run, while the others waited."
            )

    def _sentences_of_slow(self) -> Iterator[str]:
        """Yields who was made slow by --slow."""
        slow = self.run.manifest.slow.asked
        if slow in ("", "none"):
            return
        times = []
        for rank, factor in made_slow(self.run).items():
            if factor > 1:
                times.append(f"rank {rank} {factor:.1f}")
        computed = f" ({', '.join(times)} times as long as it can)" if times else ""
        yield f"--slow {slow} made workers slow{computed}: what they slept counts as computing."

    def _sentences_of_gone(self) -> Iterator[str]:
        """Yields who was lost or left, and when."""
        lost = self.run.summary.lost_workers
        left = sorted({life.rank for life in self.run.summary.membership if life.why == LEFT})
        gone = []
        for what, ranks in {"were lost": lost, "left": left}.items():
            if ranks:
                gone.append(f"{what} (rank {', '.join(map(str, ranks))})")
        if gone:
            yield (
                f"Workers {' and '.join(gone)}: while one was not there, "
                "a step before or after stands for it."
            )
        if self.timeline.left_out:
            left_out = ", ".join(map(str, self.timeline.left_out))
            yield (
                f"Left out is rank {left_out}, which took too few steps beside the others "
                "to be explained."
            )
        if not gone:
            return
        end = max(self.timeline.ends_s)
        for rank, absences in self.timeline.absent.items():
            when = []
            for begin, until in absences:
                until_words = "the end" if until >= end else f"{until:.1f} s"
                when.append(f"{begin:.1f} s to {until_words}")
            yield f"Rank {rank} was not there from {', '.join(when)}."


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def _in_words(name: str) -> str:
    return name.replace("_", " ")


def explain_run(folder: Path) -> Explained:
    """Explains a run.

    Raises:
        UsageError: the run has not finished, was resumed in another way, or is too short.
    """
    run = load_run(folder)
    if run.summary.steps:
        why_not = resumed_otherwise(run.manifest)
    else:
        why_not = f"{run.problem}; --resume goes on with a run"
    if why_not:
        raise UsageError(f"{folder} cannot be explained: {why_not}")
    timeline = read_timeline(run)
    straggler = find_straggler(timeline)
    parts = account(run, timeline)
    rates = what_if(run, timeline, straggler, parts)
    return Explained(run, timeline, straggler, _waited(timeline, straggler), parts, rates)


def _waited(timeline: Timeline, straggler: Straggler | None) -> Mapping[int, float | None]:
    """Returns seconds that the others waited for each rank; None if that is not known."""
    if timeline.in_step:
        seconds = waited_for(timeline).sum(1).tolist()
        return dict(zip(timeline.ranks, seconds, strict=True))
    if not straggler:
        return dict.fromkeys(timeline.ranks)
    steps = [len(table) for table in timeline.each_step]
    waited_s = waits_for_others(timeline) * steps
    waited_by_others_s = np.delete(waited_s, timeline.ranks.index(straggler.rank))
    mean_s = float(waited_by_others_s.mean())
    return dict.fromkeys(timeline.ranks, 0.0) | {straggler.rank: mean_s}
