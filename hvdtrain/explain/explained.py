"""All that `explain` says of a run: as figures, and for people."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hvdtrain.console import Console
from hvdtrain.errors import UsageError
from hvdtrain.explain.account import PARTS, Account, account, made_slow, waits_for_others
from hvdtrain.explain.straggler import Straggler, find_straggler, waited_for
from hvdtrain.explain.timeline import Timeline, read_timeline
from hvdtrain.explain.what_if import what_if
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
            "samples_per_s": run.summary.samples_per_s,
            "what_if": {name: {"samples_per_s": rate} for name, rate in self.rates.items()},
        }  # fmt: skip

    def show(self, console: Console) -> None:
        console.print(f"{self.title}, {self.run.summary.samples_per_s or 0:,.0f} samples/s", style="bold")
        for line in (*self._made_slow(), *self._lost(), *self._who_was_slow()):
            console.print(line)
        console.print(self._ranks())
        console.print(self._parts())
        for name, rate in self.rates.items():
            if rate and (name != "without_straggler" or self.straggler):
                gain = rate / (self.run.summary.samples_per_s or rate)
                console.print(f"{name.replace('_', ' ')}: {rate:,.0f} samples/s, {gain:.2f} times as many")

    def _made_slow(self) -> Iterator[str]:
        slow = self.run.manifest.slow
        if slow and slow.asked not in ("", "none"):
            times = [f"rank {rank} {factor:.1f}" for rank, factor in made_slow(self.run).items() if factor > 1]
            computed = f" ({', '.join(times)} times as long as it can)" if times else ""
            yield f"--slow {slow.asked} made workers slow{computed}: what they slept counts as computing."

    def _lost(self) -> Iterator[str]:
        if lost := self.run.summary.lost_workers:
            who = ", ".join(map(str, lost))
            yield f"Workers were lost (rank {who}): while one was not there, a step before or after stands for it."
        end = max(self.timeline.ends_s)
        for rank, stretches in self.timeline.absent.items() if lost else ():
            when = [f"{a:.1f} s to {'the end' if b >= end else f'{b:.1f} s'}" for a, b in stretches]
            yield f"Rank {rank} was not there from {', '.join(when)}."

    def _who_was_slow(self) -> Iterator[str]:
        if slow := self.straggler:
            yield (
                f"Rank {slow.rank} was slow, from {slow.since_s:.1f} to {slow.until_s:.1f} s: its steps took "
                f"{slow.factor:.1f} times as long as the others', who waited for it {self.waited[slow.rank]:.1f} s."
            )
        elif len(self.timeline.ranks) > 1:
            yield "No worker was slower than the others by a tenth of a step, all the time or for a fifth of it."

    def _ranks(self) -> Table:
        table = Table()
        for heading in ("rank", "worker", "computes in a step", "waits in a step", "others waited for it"):
            table.add_column(heading, justify="right")
        for rank, mean in zip(self.timeline.ranks, self.timeline.means, strict=True):
            others = "" if (seconds := self.waited[rank]) is None else f"{seconds:,.1f} s"
            worker = str(rank - self.run.kind.servers)
            table.add_row(str(rank), worker, f"{1000 * mean[1]:,.1f} ms", f"{1000 * mean[2]:,.1f} ms", others)
        return table

    def _parts(self) -> Table:
        table, account = Table(), self.account
        for heading in ("part of a step", "ms", "share", "what it is"):
            table.add_column(heading, justify="right" if heading in ("ms", "share") else "left")
        for name, seconds in account.parts.items():
            figures = (f"{1000 * seconds:,.1f}", f"{seconds / account.step_s:.1%}")
            what = account.unknown.get(name, PARTS[name])
            table.add_row(name.replace("_", " "), *(("", "") if name in account.unknown else figures), what)
        table.add_section()
        table.add_row("together", f"{1000 * account.step_s:,.1f}", "100%", "the mean of all steps that workers took")
        return table


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
    beyond = waits_for_others(timeline) * [len(own) for own in timeline.each_step]
    own = beyond[timeline.ranks.index(straggler.rank)]
    by_each = float((beyond.sum() - own) / (len(beyond) - 1))  # of the others, on average
    return dict.fromkeys(timeline.ranks, 0.0) | {straggler.rank: by_each}
