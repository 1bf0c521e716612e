"""All that `explain` says of a run: as figures, and for people."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.console import Console
from hvdtrain.errors import UsageError
from hvdtrain.explaining.account import PARTS, Account, account, made_slow, waits_for_others
from hvdtrain.explaining.straggler import Straggler, find_straggler, waited_for
from hvdtrain.explaining.timeline import COMPUTED, WAITED, Timeline, read_timeline
from hvdtrain.explaining.what_if import what_if
from hvdtrain.report.table import rich_table, words_table
from hvdtrain.runs.read import Run, load_run, resumed_otherwise


@dataclass(frozen=True)
class Explained:
    """
    Attributes:
        waited: seconds that the others waited for each rank; None where that is not known.
        rates: see what_if.
    """

    run: Run
    timeline: Timeline
    straggler: Straggler | None
    waited: Mapping[int, float | None]
    account: Account
    rates: dict[str, float | None]

    @property
    def of_round(self) -> dict[str, float]:
        """Seconds of each part of a round; empty without --local-steps."""
        steps = self.run.local_steps
        return self.account.of_round(steps, bool(self.run.kind.servers)) if steps > 1 else {}

    @property
    def title(self) -> str:
        return f"{self.run.name}: {self.run.kind.label}"

    @property
    def data(self) -> dict[str, Any]:
        """An object of the file of --json."""
        run, straggler = self.run, self.straggler
        return {
            "run": str(run.folder), "mode": run.kind.mode, "workers": run.kind.workers, "servers": run.kind.servers,
            "straggler": straggler and straggler.rank, "factor": straggler and straggler.factor,
            "slow_from_s": straggler and straggler.since_s, "slow_until_s": straggler and straggler.until_s,
            "absent_s": {str(rank): stretches for rank, stretches in self.timeline.absent.items()},
            "waited_s": {str(rank): seconds for rank, seconds in self.waited.items()},
            "step_s": self.account.step_s, "parts": self.account.parts, "unknown": self.account.unknown,
            "round": self.of_round, "samples_per_s": run.summary.samples_per_s,
            "what_if": {name: {"samples_per_s": rate} for name, rate in self.rates.items()},
        }  # fmt: skip

    def show(self, console: Console) -> None:
        console.print(f"{self.title}, {self.run.summary.samples_per_s or 0:,.0f} samples/s", style="bold")
        for line in self._sentences():
            console.print(line)
        means = zip(self.timeline.ranks, 1000 * self.timeline.means[:, [COMPUTED, WAITED]], strict=True)
        ranks = [
            [
                str(rank), str(rank - self.run.kind.servers), f"{computed:,.1f} ms", f"{waited:,.1f} ms",
                "" if (seconds := self.waited[rank]) is None else f"{seconds:,.1f} s",
            ]
            for rank, (computed, waited) in means
        ]  # fmt: skip
        headings = ("rank", "worker", "computes in a step", "waits in a step", "others waited for it")
        console.print(rich_table(words_table("", headings, ranks)))
        account, parts = self.account, []
        for name, seconds in account.parts.items():
            figures = ["", ""] if name in account.unknown else [_ms(seconds), f"{seconds / account.step_s:.1%}"]
            parts.append([name.replace("_", " "), *figures, account.unknown.get(name, PARTS[name])])
        parts.append(["together", _ms(account.step_s), "100%", "the mean of all steps that workers took"])
        console.print(rich_table(words_table("", ("part of a step", "ms", "share", "what it is"), parts)))
        if of_round := self.of_round:
            told = ", ".join(f"{name.replace('_', ' ')} {_ms(seconds)}" for name, seconds in of_round.items())
            console.print(f"a round of {self.run.local_steps} steps, in ms: {told}")
        for name, rate in self.rates.items():
            if rate and (name != "without_straggler" or self.straggler):
                gain = rate / (self.run.summary.samples_per_s or rate)
                console.print(f"{name.replace('_', ' ')}: {rate:,.0f} samples/s, {gain:.2f} times as many")

    def _sentences(self) -> Iterator[str]:
        """Who was made slow, who was lost, and who was slow."""
        asked, lost = self.run.manifest.slow.asked, self.run.summary.lost_workers
        if asked not in ("", "none"):
            times = [f"rank {rank} {factor:.1f}" for rank, factor in made_slow(self.run).items() if factor > 1]
            computed = f" ({', '.join(times)} times as long as it can)" if times else ""
            yield f"--slow {asked} made workers slow{computed}: what they slept counts as computing."
        if lost:
            who = ", ".join(map(str, lost))
            yield f"Workers were lost (rank {who}): while one was not there, a step before or after stands for it."
        end = max(self.timeline.ends_s)
        for rank, stretches in self.timeline.absent.items() if lost else ():
            when = [f"{a:.1f} s to {'the end' if b >= end else f'{b:.1f} s'}" for a, b in stretches]
            yield f"Rank {rank} was not there from {', '.join(when)}."
        if slow := self.straggler:
            yield (
                f"Rank {slow.rank} was slow, from {slow.since_s:.1f} to {slow.until_s:.1f} s: its steps took "
                f"{slow.factor:.1f} times as long as the others', who waited for it {self.waited[slow.rank]:.1f} s."
            )
        elif len(self.timeline.ranks) > 1:
            yield "No worker was slower than the others by a tenth of a step, all the time or for a fifth of it."


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def explain_run(folder: Path) -> Explained:
    """UsageError where the run has not finished, was resumed in another way, or is too short."""
    run = load_run(folder)
    if why := resumed_otherwise(run.manifest) if run.summary.steps else f"{run.problem}; --resume goes on with a run":
        raise UsageError(f"{folder} cannot be explained: {why}")
    timeline = read_timeline(run)
    straggler, parts = find_straggler(timeline), account(run, timeline)
    rates = what_if(run, timeline, straggler, parts)
    return Explained(run, timeline, straggler, _waited(timeline, straggler), parts, rates)


def _waited(timeline: Timeline, straggler: Straggler | None) -> Mapping[int, float | None]:
    if timeline.in_step:
        return dict(zip(timeline.ranks, waited_for(timeline).sum(1).tolist(), strict=True))
    if not straggler:
        return dict.fromkeys(timeline.ranks)
    waited = waits_for_others(timeline) * [len(steps) for steps in timeline.each_step]
    of_others = np.delete(waited, timeline.ranks.index(straggler.rank))
    by_each = float(of_others.mean())
    return dict.fromkeys(timeline.ranks, 0.0) | {straggler.rank: by_each}
