"""What could turn an answer: each is said only where the runs give a reason for it, the weightiest first.

The first two are said beside the answer, and the others are folded away in the report.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from msgspec import to_builtins

from hvdtrain import modes
from hvdtrain.errors import UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.numerics.slowdown import factor_of_all
from hvdtrain.report import figures
from hvdtrain.report.columns import busiest_share, cpu_s_per_1000_samples
from hvdtrain.report.contenders import Field, Margins, Sides, timed
from hvdtrain.report.quality import Quality, trained
from hvdtrain.report.race import EITHER, ONE_MACHINE, RING, SERVERS, Outcome
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Kind, Run
from hvdtrain.world.host import differences
from hvdtrain.world.load import beside_others

NEARLY_ALL = 0.9
ENOUGH_TO_TARGET = 10  # trainings of each
_SHORT_S = 5


@dataclass(frozen=True)
class Case:
    """A comparison, what its speeds say, and what was tested besides.

    Attributes:
        outcome: with the word that is the answer.
        tested: how those that the word speaks for stand to their opponents.
        dropped: kinds that were faster and learn less.
    """

    field: Field
    of: Sides
    outcome: Outcome
    tested: dict[Kind, Quality]
    dropped: list[Kind]
    margins: Margins

    @property
    def named(self) -> list[tuple[Kind, list[Run]]]:
        """The two that the word is about, with their runs."""
        return [(kind, self.field.by_kind[kind]) for kind in self.outcome.pair or ()]


Doubt = Callable[[Case], Iterator[str]]


def _of(sentence: str, applies: Callable[[Run], object]) -> Doubt:
    """Of the kinds of which at least one run fulfils the condition; `{}` in the sentence names them."""

    def doubt(case: Case) -> Iterator[str]:
        named = [kind.label for kind, runs in case.field.by_kind.items() if kind.family and any(map(applies, runs))]
        if named:
            yield sentence.format(", ".join(named))

    return doubt


def _not_tried(case: Case) -> Iterator[str]:
    if case.outcome.pair and not case.of.machines:
        yield "one machine was not tried"
    if case.outcome.word in (RING, SERVERS) and not (case.of.rings and case.of.servers):
        yield f"no {'servers were' if case.of.rings else 'ring was'} tried"


def _one_did_it_all(case: Case) -> Iterator[str]:
    for kind, runs in case.named:
        share = figures.mean(timed(runs), busiest_share)
        if share is not None and share >= NEARLY_ALL:
            yield f"one of {with_noun(kind.workers, 'worker')} of {kind.label} did {share:.0%} of the samples"


def _left_out(case: Case) -> Iterator[str]:
    for kind in case.dropped:
        accuracy = figures.mean(trained(case.field, kind), figures.accuracy)
        yield f"{kind.label} did more samples/s, and learned less: {accuracy or 0:.3f}"
    if case.of.left_out:
        named = ", ".join(kind.label for kind in case.of.left_out)
        yield f"left out, as they have too few repeats at the time of the others: {named}"


def _processes(case: Case) -> Iterator[str]:
    """A ring of as many processes as the servers and their workers."""
    served = next((kind for kind, _ in case.named if kind.servers), None)
    if not served or case.outcome.word not in (RING, SERVERS, EITHER):
        return
    for kind in case.field.by_kind:
        if kind.family == modes.RING and kind.workers == served.workers + served.servers:
            logs = case.field.log_ratios(kind, served)
            over = fmean(logs) if logs else 0.0
            if over < 0 if case.outcome.word == RING else over >= math.log1p(case.margins.speed):
                ratio = f"{figures.times(math.exp(over))} times the samples/s of {served.label}"
                yield f"{kind.label}, a ring of as many processes, did {ratio}"


def _other_measures(case: Case) -> Iterator[str]:
    """Processor time, and the time to the target, by which the answer would be another."""
    if case.outcome.word not in (RING, SERVERS):
        return
    (one, runs), (other, others) = case.named
    spent = [figures.mean(timed(of), cpu_s_per_1000_samples) for of in (runs, others)]
    if spent[0] and spent[1] and spent[0] > spent[1] * (1 + case.margins.speed):
        yield f"{one.label} took {spent[0]:.2f} s of processor time for 1,000 samples, {other.label} {spent[1]:.2f}"
    longer = figures.ratio_of_times(runs, others)
    if longer and longer["n"] >= ENOUGH_TO_TARGET and (longer["ci_low"] or 0) > 1:
        yield f"{one.label} took {figures.times(longer['ratio'])} times as long to the target accuracy"


def _outer_optimizer(case: Case) -> Iterator[str]:
    """Local steps by themselves, in one process, bring it to the target sooner."""
    machines = [(kind, runs) for kind, runs in case.field.by_kind.items() if kind.family == modes.ONE_MACHINE]
    plain = next((machine for machine in machines if not _takes_local_steps(machine[1])), None)
    if not plain or not any(_takes_local_steps(runs) for _, runs in case.named):
        return
    for control, runs in machines:
        sooner = figures.ratio_of_times(runs, plain[1]) if _takes_local_steps(runs) else None
        if sooner and (sooner["ci_high"] or 1) < 1:
            took = f"{control.label} took {figures.times(sooner['ratio'])} times as long as {plain[0].label}"
            yield f"an outer optimizer gains without messages too: {took} to the target accuracy"


def _takes_local_steps(runs: Sequence[Run]) -> bool:
    return "local_steps" in runs[0].manifest.options


def _busy_hosts(case: Case) -> Iterator[str]:
    runs = [run for _, of_kind in case.named for run in timed(of_kind)]
    if busy := [lines for run in runs if (lines := beside_others(run.summary.load))]:
        yield f"in {len(busy)} of {len(runs)} runs hosts did other work too: {busy[0][0]}"


def _one_host(case: Case) -> Iterator[str]:
    if case.named and all(field_value(runs[0], "hardware.hosts") == 1 for _, runs in case.named):
        yield "all ran on one host: over several, workers have more cores, and messages a network to cross"


def _crowded(case: Case) -> Iterator[str]:
    for kind, runs in case.named:
        manifest, asked = runs[0].manifest, field_value(runs[0], "slow.asked")
        usable = [host.cores_usable for host in manifest.hosts.values() if host.cores_usable is not None]
        cores = sum(usable) or (manifest.hardware.cores or 0) * (field_value(runs[0], "hardware.hosts") or 1)
        factor, threads = 1.0, manifest.threads_per_worker or 0
        with contextlib.suppress(UsageError):
            factor = factor_of_all(asked)  # workers sleep for the rest of that
        if 0 < cores < kind.workers * threads / factor + kind.servers:
            servers = f" and {with_noun(kind.servers, 'server')}" if kind.servers else ""
            each = f"{with_noun(kind.workers, 'worker')} × {with_noun(threads, 'thread')}{servers}"
            yield f"more busy threads than cores: {kind.label}: {each} on {with_noun(cores, 'core')}"


def _slowed(case: Case) -> Iterator[str]:
    for kind, runs in case.field.by_kind.items():
        slowed = [run.manifest.slow.achieved for run in runs if run.manifest.slow.asked != "none"]
        workers = slowed[0] if slowed else ()
        if each := [f"worker {w} {fmean(factors[w] for factors in slowed if w in factors):.2f}" for w in workers]:
            yield f"workers of {kind.label} were made slow, and computed so many times as long: {', '.join(each)}"


def _hosts_differ(case: Case) -> Iterator[str]:
    first = [runs[0] for runs in case.field.by_kind.values()]
    lines = dict.fromkeys(line for run in first for line in differences(to_builtins(run.manifest.hosts)))
    if lines:
        yield f"hosts of one run differ: {'; '.join(lines)}"


DOUBTS: Sequence[Doubt] = (
    _not_tried,
    _one_did_it_all,
    _of("the loss became NaN: {}", lambda run: math.isnan(run.summary.val_loss or 0.0)),
    _left_out,
    _processes,
    _other_measures,
    _outer_optimizer,
    _busy_hosts,
    lambda case: _one_host(case) if case.outcome.word == ONE_MACHINE else _crowded(case),
    _of("workers or servers came and went: {}; `membership` and `returned_servers` in summary.json say when",
        lambda run: run.summary.returned_servers
        or any(life.why or life.incarnation > 1 for life in run.summary.membership)),
    _of("stopped and resumed, and each start warms up anew: {}", lambda run: len(run.manifest.parts) > 1),
    _slowed,
    _hosts_differ,
    _of(f"trained for less than {_SHORT_S} s, in which the first steps, slower than all others, weigh: {{}}",
        lambda run: not run.manifest.sprint and 0 < (run.summary.wall_s or 0) < _SHORT_S),
    _of("batch norm takes its statistics from one worker's share, so the mathematics depends on their number: {}",
        lambda run: run.manifest.batch_norm),
    _of("workers draw their own dropout masks, so runs differ by chance: {}", lambda run: run.manifest.dropout_layers),
    lambda case: _crowded(case) if case.outcome.word == ONE_MACHINE else _one_host(case),
)  # fmt: skip
