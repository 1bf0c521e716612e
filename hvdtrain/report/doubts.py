"""What could turn an answer: each is said only where the runs give a reason for it, the weightiest first."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import to_builtins

from hvdtrain import modes
from hvdtrain.formatting import with_noun
from hvdtrain.report import figures
from hvdtrain.report.caveats import oversubscribed
from hvdtrain.report.columns import cpu_s_per_1000_samples
from hvdtrain.report.contenders import Field, Margins, Sides, timed
from hvdtrain.report.quality import Quality, trained
from hvdtrain.report.race import EITHER, ONE_MACHINE, RING, SERVERS, Outcome
from hvdtrain.report.target import ratio_of_times
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Kind, Run
from hvdtrain.world.load import beside_others

MOST = 2
NEARLY_ALL = 0.9
ENOUGH_TO_TARGET = 10  # trainings of each


@dataclass(frozen=True)
class Case:
    """A comparison, what its speeds say, and what was tested besides.

    Attributes:
        found: with the word that is the answer.
        tested: how those that the word speaks for stand to their opponents.
        dropped: kinds that were faster and learn less.
    """

    field: Field
    of: Sides
    found: Outcome
    tested: dict[Kind, Quality]
    dropped: list[Kind]
    margins: Margins

    @property
    def named(self) -> list[tuple[Kind, list[Run]]]:
        """The two that the word is about, with their runs."""
        return [(kind, self.field.by_kind[kind]) for kind in self.found.pair or ()]


def doubts(case: Case) -> list[str]:
    """At most two lines."""
    lines = (line for doubt in _DOUBTS for line in doubt(case))
    return [line for line, _ in zip(lines, range(MOST), strict=False)]


def _not_tried(case: Case) -> Iterator[str]:
    if case.found.pair and not case.of.machines:
        yield "one machine was not tried"
    if case.found.word in (RING, SERVERS) and not (case.of.rings and case.of.servers):
        yield f"no {'servers were' if case.of.rings else 'ring was'} tried"


def _one_did_it_all(case: Case) -> Iterator[str]:
    for kind, runs in case.named:
        share = figures.mean(timed(runs), figures.busiest_share)
        if share is not None and share >= NEARLY_ALL:
            yield f"one of {with_noun(kind.workers, 'worker')} of {kind.label} did {share:.0%} of the samples"


def _learned_less(case: Case) -> Iterator[str]:
    for kind in case.dropped:
        own = figures.mean(trained(case.field, kind), figures.accuracy)
        yield f"{kind.label} did more samples/s, and learned less: {own or 0:.3f}"


def _few_repeats(case: Case) -> Iterator[str]:
    if case.of.left_out:
        named = ", ".join(kind.label for kind in case.of.left_out)
        yield f"left out, as they have too few repeats at the time of the others: {named}"


def _diverged(case: Case) -> Iterator[str]:
    for kind, runs in case.named:
        if any(math.isnan(run.summary.val_loss or 0.0) for run in runs):
            yield f"the loss of {kind.label} became NaN"


def _busy_hosts(case: Case) -> Iterator[str]:
    runs = [run for _, own in case.named for run in timed(own)]
    if found := [line for run in runs for line in beside_others(to_builtins(run.summary.load))]:
        yield f"in {len(found)} of {len(runs)} runs hosts did other work beside: {found[0]}"


def _shared_cores(case: Case) -> Iterator[str]:
    if case.found.word == ONE_MACHINE:
        kind, runs = case.named[-1] if case.named[0][0].family == modes.ONE_MACHINE else case.named[0]
        if field_value(runs[0], "hardware.hosts") == 1:
            yield f"{kind.label} ran on one host too: hosts for each worker have more cores"
        return
    if crowded := [text for kind, runs in case.named if (text := oversubscribed(kind, runs))]:
        yield f"more busy threads than cores: {'; '.join(crowded)}"


def _processes(case: Case) -> Iterator[str]:
    """A ring of as many processes as the servers and their workers."""
    served = next((kind for kind, _ in case.named if kind.servers), None)
    if not served or case.found.word not in (RING, SERVERS, EITHER):
        return
    for kind in case.field.by_kind:
        if kind.family == modes.RING and kind.workers == served.workers + served.servers:
            logs = case.field.log_ratios(kind, served)
            over = sum(logs) / len(logs) if logs else 0.0
            is_ahead = over >= math.log1p(case.margins.speed)
            if (case.found.word != RING and is_ahead) or (case.found.word == RING and over < 0):
                ratio = f"{figures.times(math.exp(over))} times the samples/s of {served.label}"
                yield f"{kind.label}, a ring of as many processes, did {ratio}"


def _processor_time(case: Case) -> Iterator[str]:
    if case.found.word not in (RING, SERVERS):
        return
    spent = [figures.mean(timed(runs), cpu_s_per_1000_samples) for _, runs in case.named]
    if len(spent) == 2 and spent[0] and spent[1] and spent[0] > spent[1] * (1 + case.margins.speed):
        (one, _), (other, _) = case.named
        yield f"{one.label} took {spent[0]:.2f} s of processor time for 1,000 samples, {other.label} {spent[1]:.2f}"


def _time_to_target(case: Case) -> Iterator[str]:
    if case.found.word not in (RING, SERVERS) or len(case.named) < 2:
        return
    found = ratio_of_times(*(runs for _, runs in case.named))
    if found and found["n"] >= ENOUGH_TO_TARGET and (found["ci_low"] or 0) > 1:
        yield f"it took {figures.times(found['ratio'])} times as long to the target accuracy"


_DOUBTS: Sequence[Callable[[Case], Iterator[str]]] = (
    _not_tried, _one_did_it_all, _learned_less, _diverged, _few_repeats, _processes, _processor_time, _time_to_target,
    _busy_hosts, _shared_cores,
)  # fmt: skip
