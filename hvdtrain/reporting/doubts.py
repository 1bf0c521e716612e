"""What could turn an answer. A doubt is told only if the runs give a reason for it.

DOUBTS has the weightiest first. The first two are told beside the answer, and the report folds away
the others.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from msgspec import to_builtins

from hvdtrain.base import modes
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.numerics.slowdown import factor_of_all
from hvdtrain.base.world.host import differences
from hvdtrain.base.world.load import beside_others
from hvdtrain.reporting import figures
from hvdtrain.reporting.columns import busiest_share, cpu_s_per_1000_samples
from hvdtrain.reporting.conduct import Conduct
from hvdtrain.reporting.contenders import Contenders, Margins, Sides
from hvdtrain.reporting.drift import drift
from hvdtrain.reporting.measures import SPEED, TIME_TO_TARGET, speed_runs
from hvdtrain.reporting.quality import Quality, trained
from hvdtrain.reporting.race import EITHER, ONE_MACHINE_WINS, RING_WINS, SERVERS_WIN, Verdict
from hvdtrain.reporting.target import Target
from hvdtrain.runs.command_lines import LONGER
from hvdtrain.runs.fields import core_sharing, field_value
from hvdtrain.runs.read import Kind, Run

NEARLY_ALL = 0.9
_SHORT_S = 5


@dataclass(frozen=True)
class Evidence:
    """What an answer rests on.

    Attributes:
        contenders: the finished runs.
        sides: who is compared.
        verdict: who is ahead by what decides, with the word that is the answer.
        qualities: how the accuracy of the kinds that the word speaks for compares with that of
            their opponents.
        dropped: kinds that were faster and learn less.
        margins: the smallest differences that matter.
        conduct: what was done beside the runs that count.
    """

    contenders: Contenders
    sides: Sides
    verdict: Verdict
    qualities: dict[Kind, Quality]
    dropped: list[Kind]
    margins: Margins
    conduct: Conduct

    @property
    def opponents(self) -> list[tuple[Kind, list[Run]]]:
        """The two kinds that the word is about, with their runs; empty if there is no such pair."""
        return [(kind, self.contenders.by_kind[kind]) for kind in self.verdict.pair or ()]


Doubt = Callable[[Evidence], Iterator[str]]


def _if_any_run(sentence: str, applies: Callable[[Run], object]) -> Doubt:
    """Returns a doubt about the kinds of which at least one run fulfils the condition.

    Args:
        sentence: the doubt. `{}` in the sentence stands for the kinds.
        applies: the condition.
    """

    def doubt(evidence: Evidence) -> Iterator[str]:
        labels = []
        for kind, runs in evidence.contenders.by_kind.items():
            if kind.family and any(map(applies, runs)):
                labels.append(kind.label)
        if labels:
            yield sentence.format(", ".join(labels))

    return doubt


def _not_tried(evidence: Evidence) -> Iterator[str]:
    sides = evidence.sides
    left_out = {kind.family for kind in sides.left_out}  # _left_out names them
    has_machine = sides.machines or modes.ONE_MACHINE in left_out
    if evidence.verdict.pair and not has_machine:
        yield "one machine was not tried"
    if evidence.verdict.word not in (RING_WINS, SERVERS_WIN):
        return
    if not (sides.rings or modes.RING in left_out):
        yield "no ring was tried"
    if not (sides.servers or modes.SERVERS in left_out):
        yield "no servers were tried"


def _parts_of_machine(evidence: Evidence) -> Iterator[str]:
    """Yields processes with a part of the cores, if no process had all: they have no row."""
    kinds = evidence.contenders.by_kind
    parts = [kind for kind in kinds if not kind.family]
    have_rows = len(parts) == len(kinds)
    if parts and not evidence.sides.machines and not have_rows:
        labels = ", ".join(kind.label for kind in parts)
        yield f"not in the table, since no process had all cores: {labels}"


def _one_did_it_all(evidence: Evidence) -> Iterator[str]:
    for kind, runs in evidence.opponents:
        share = figures.mean(speed_runs(runs), busiest_share)
        if share is not None and share >= NEARLY_ALL:
            workers = with_noun(kind.workers, "worker")
            yield f"one of {workers} of {kind.label} did {share:.0%} of the samples"


def _left_out(evidence: Evidence) -> Iterator[str]:
    for kind in evidence.dropped:
        accuracy = figures.mean(trained(evidence.contenders, kind), figures.accuracy)
        yield f"{kind.label} did more samples/s, and learned less: {accuracy or 0:.3f}"
    if evidence.sides.left_out:
        labels = ", ".join(kind.label for kind in evidence.sides.left_out)
        yield f"not compared, with fewer repeats than others at the same time: {labels}"


def _as_many_processes(evidence: Evidence) -> Iterator[str]:
    """Yields rings on as many processes as workers and servers, if they turn the answer."""
    word = evidence.verdict.word
    served = next((kind for kind, _ in evidence.opponents if kind.servers), None)
    if not served or word not in (RING_WINS, SERVERS_WIN, EITHER):
        return
    processes = served.workers + served.servers
    for kind in evidence.contenders.by_kind:
        if kind.family != modes.RING or kind.workers != processes:
            continue
        logs = evidence.contenders.log_ratios(kind, served).values
        lead = fmean(logs) if logs else 0.0
        if word == RING_WINS:
            turns = lead < 0
        else:
            turns = lead >= math.log1p(evidence.margins.speed)
        if turns:
            ratio = figures.format_ratio(math.exp(lead))
            ring = f"{kind.label}, a ring of as many processes,"
            if evidence.contenders.measure is SPEED:
                yield f"{ring} did {ratio} times the samples/s of {served.label}"
            else:
                yield f"{ring} was {ratio} times as fast to the target as {served.label}"


def _other_measures(evidence: Evidence) -> Iterator[str]:
    """Yields measures by which the answer would be another: processor time, time to the target."""
    if evidence.verdict.word not in (RING_WINS, SERVERS_WIN):
        return
    (winner, runs), (loser, loser_runs) = evidence.opponents
    cpu_s = figures.mean(speed_runs(runs), cpu_s_per_1000_samples)
    loser_cpu_s = figures.mean(speed_runs(loser_runs), cpu_s_per_1000_samples)
    least = 1 + evidence.margins.speed
    if cpu_s and loser_cpu_s and cpu_s > loser_cpu_s * least:
        yield (
            f"{winner.label} took {cpu_s:.2f} s of processor time for 1,000 samples, "
            f"{loser.label} {loser_cpu_s:.2f}"
        )
    times = None
    if evidence.contenders.measure is SPEED:
        times = figures.ratio_of_times(runs, loser_runs)
    if times and times["ratio"] > least:
        ratio = figures.format_ratio(times["ratio"])
        trainings = with_noun(times["n"], "training")
        yield (
            f"{winner.label} took {ratio} times as long to the target accuracy, "
            f"in {trainings} of each"
        )


def _missed_target(evidence: Evidence) -> Iterator[str]:
    """Yields who did not always reach the target that decides."""
    if evidence.contenders.measure is not TIME_TO_TARGET:
        return
    missed = []
    for kind, runs in evidence.opponents:
        reaches = figures.reaches(runs)
        number = sum(not reach.is_reached for reach in reaches)
        if number:
            missed.append(f"{number} of {len(reaches)} of {kind.label}")
    if missed:
        yield (
            f"trainings ended without the target: {', '.join(missed)}; each counts as all of its "
            "time, and takes longer"
        )


def _rates_at_edge(evidence: Evidence) -> Iterator[str]:
    """Yields learning rates that may be better still beyond those that were tried."""
    for rate in evidence.conduct.rates:
        if rate.is_at_edge:
            yield (
                f"the best learning rate of {', '.join(rate.of)}, {rate.found:g}, is at the edge of "
                f"those that were tried around {rate.around:g}: look around another"
            )


def _reached_at_once(evidence: Evidence) -> Iterator[str]:
    """Yields that the first evaluation reached the target, so that the time is not known well."""
    if evidence.contenders.measure is not TIME_TO_TARGET:
        return
    target = figures.target(evidence.contenders) or Target(0)
    harder = "lower" if target.is_loss else "higher"
    for kind, runs in evidence.opponents:
        evaluations = [run.summary.evaluations[0] for run in runs if run.summary.evaluations]
        firsts = [figure for figure in map(target.figure, evaluations) if figure is not None]
        if any(map(target.is_reached_by, firsts)):
            yield (
                f"the first evaluation of {kind.label} reached the target: a {harder} one tells more"
            )


def _outer_optimizer(evidence: Evidence) -> Iterator[str]:
    """Yields single processes with local steps that reach the target sooner than without."""
    if not any(_takes_local_steps(runs) for _, runs in evidence.opponents):
        return
    plain = None
    with_local_steps = []
    for kind, runs in evidence.contenders.by_kind.items():
        if kind.family != modes.ONE_MACHINE or kind.workers != 1:
            continue
        if _takes_local_steps(runs):
            with_local_steps.append((kind, runs))
        elif plain is None:
            plain = (kind, runs)
    if plain is None:
        return
    plain_kind, plain_runs = plain
    for kind, runs in with_local_steps:
        times = figures.ratio_of_times(runs, plain_runs)
        if times and (times["ci_high"] or 1) < 1:
            ratio = figures.format_ratio(times["ratio"])
            yield (
                f"an outer optimizer gains without messages too: {kind.label} took {ratio} times "
                f"as long as {plain_kind.label} to the target accuracy"
            )


def _takes_local_steps(runs: Sequence[Run]) -> bool:
    return "local_steps" in runs[0].manifest.options


def _drifts(evidence: Evidence) -> Iterator[str]:
    for kind, runs in evidence.opponents:
        change = drift(speed_runs(runs))
        if change is None:
            continue
        comparative = "longer" if change > 0 else "shorter"
        cause = "turbo or heat" if change > 0 else "they had not settled"
        sprint_s = max(run.manifest.sprint for run in runs)
        yield (
            f"within sprints of {kind.label} steps took {abs(change):.0%} {comparative} in the "
            f"last third than in the first ({cause}): "
            f"`--sprint {LONGER * sprint_s:g}` shows what lasts"
        )


def busy_runs(evidence: Evidence) -> tuple[list[list[str]], int]:
    """Returns what hosts did beside counted runs, and how many runs count.

    There is a list of lines for each run that was not alone.
    """
    sides = evidence.sides
    compared = [*sides.distributed, *sides.machines]
    counted = 0
    busy = []
    for kind in compared:
        for run in speed_runs(evidence.contenders.by_kind[kind]):
            counted += 1
            lines = beside_others(run.summary.load)
            if lines:
                busy.append(lines)
    return busy, counted


def _busy_hosts(evidence: Evidence) -> Iterator[str]:
    busy, counted = busy_runs(evidence)
    if not busy:
        return
    disturbed = evidence.conduct.disturbed
    set_aside = ""
    if disturbed:
        sprints = with_noun(disturbed, "such sprint")
        set_aside = f", after {sprints} had been set aside and run again"
    yield f"in {len(busy)} of {counted} runs hosts did other work too: {busy[0][0]}{set_aside}"


def _one_host(evidence: Evidence) -> Iterator[str]:
    hosts = [field_value(runs[0], "hardware.hosts") for _, runs in evidence.opponents]
    if hosts and all(number == 1 for number in hosts):
        yield (
            "all ran on one host: over several hosts workers have more cores, "
            "and messages cross a network"
        )


def _more_hosts(evidence: Evidence) -> Iterator[str]:
    """Yields which side has hosts that its opponent lacks, such as those of servers."""
    hosts = {}
    for kind, runs in evidence.opponents:
        if kind.is_distributed:
            hosts[kind] = field_value(runs[0], "hardware.hosts") or 1
    if len(set(hosts.values())) > 1:
        most = max(hosts, key=hosts.__getitem__)
        fewest = min(hosts, key=hosts.__getitem__)
        yield f"{most.label} used {hosts[most]} hosts, {fewest.label} {hosts[fewest]}"


def _other_batch(evidence: Evidence) -> Iterator[str]:
    """Yields the batches if they differ.

    With --per-worker one process has the batch of one worker.
    """
    batches = {kind: runs[0].manifest.global_batch for kind, runs in evidence.opponents}
    if len(set(batches.values())) > 1:
        told = ", ".join(f"{kind.label} of {batch}" for kind, batch in batches.items())
        what = evidence.contenders.measure.what
        yield f"batches differ, and {what} are compared: {told}"


def _other_slow(evidence: Evidence) -> Iterator[str]:
    """Yields --slow of each side if it differs. One machine is slow where the first worker is."""
    slow = {kind: field_value(runs[0], "slow.asked") for kind, runs in evidence.opponents}
    if len(set(slow.values())) > 1:
        told = ", ".join(f"{kind.label}: {setting}" for kind, setting in slow.items())
        yield f"only worker 0 exists on one machine, so --slow differs: {told}"


def _shared_cores(evidence: Evidence) -> Iterator[str]:
    for kind, runs in evidence.opponents:
        sharing = core_sharing(runs[0])
        if sharing > 1:
            hosts = with_noun(len(runs[0].manifest.hosts), "host")
            yield (
                f"the {hosts} of {kind.label} are one machine, of which they claim {sharing:.3g} "
                "times the cores: hosts that are machines would compute faster "
                "(`hvdtrain hosts up --cpus` gives each a part)"
            )


def _crowded(evidence: Evidence) -> Iterator[str]:
    """Yields the kinds that keep more threads busy than their hosts have cores."""
    for kind, runs in evidence.opponents:
        run = runs[0]
        cores = _cores_of_hosts(run)
        threads = run.manifest.threads_per_worker or 0
        factor = 1.0
        with contextlib.suppress(UsageError):
            # Workers that are all made slow sleep for the rest of the time.
            factor = factor_of_all(field_value(run, "slow.asked"))
        if 0 < cores < kind.workers * threads / factor + kind.servers:
            processes = f"{with_noun(kind.workers, 'worker')} × {with_noun(threads, 'thread')}"
            if kind.servers:
                processes += f" and {with_noun(kind.servers, 'server')}"
            yield (
                f"more busy threads than cores: {kind.label}: {processes} "
                f"on {with_noun(cores, 'core')}"
            )


def _cores_of_hosts(run: Run) -> float:
    """Returns how many cores the hosts of a run have together; 0 if that is not known."""
    usable = [host.cores_usable for host in run.manifest.hosts.values()]
    total = sum(cores for cores in usable if cores is not None)
    if total:
        return total
    hosts = field_value(run, "hardware.hosts") or 1
    return (run.manifest.hardware.cores or 0) * hosts


def _slowed(evidence: Evidence) -> Iterator[str]:
    for kind, runs in evidence.contenders.by_kind.items():
        slowed = [run.manifest.slow.achieved for run in runs if run.manifest.slow.asked != "none"]
        workers = slowed[0] if slowed else ()
        told = []
        for worker in workers:
            mean = fmean(factors[worker] for factors in slowed if worker in factors)
            told.append(f"worker {worker} {mean:.2f}")
        if told:
            yield (
                f"workers of {kind.label} were made slow, "
                f"and computed so many times as long: {', '.join(told)}"
            )


def _hosts_differ(evidence: Evidence) -> Iterator[str]:
    lines: dict[str, None] = {}
    for runs in evidence.contenders.by_kind.values():
        lines |= dict.fromkeys(differences(to_builtins(runs[0].manifest.hosts)))
    if lines:
        yield f"hosts of one run differ: {'; '.join(lines)}"


def _has_diverged(run: Run) -> bool:
    return math.isnan(run.summary.val_loss or 0.0)


def _came_and_went(run: Run) -> bool:
    """Returns whether a worker or a server of the run was lost, left, or joined later."""
    if run.summary.returned_servers:
        return True
    return any(life.why or life.incarnation > 1 for life in run.summary.membership)


def _was_resumed(run: Run) -> bool:
    return len(run.manifest.parts) > 1


def _is_short(run: Run) -> bool:
    return not run.manifest.sprint and 0 < (run.summary.wall_s or 0) < _SHORT_S


def _main_doubt_of_cores(evidence: Evidence) -> Iterator[str]:
    """Yields the doubt about one host if one machine is the answer, else about crowded cores."""
    is_machine = evidence.verdict.word == ONE_MACHINE_WINS
    return _one_host(evidence) if is_machine else _crowded(evidence)


def _minor_doubt_of_cores(evidence: Evidence) -> Iterator[str]:
    """Yields the doubt that _main_doubt_of_cores does not."""
    is_machine = evidence.verdict.word == ONE_MACHINE_WINS
    return _crowded(evidence) if is_machine else _one_host(evidence)


def _bad_images(evidence: Evidence) -> Iterator[str]:
    """Names the damaged images that no run was trained or tested on: the same in all runs."""
    for runs in evidence.contenders.by_kind.values():
        bad = runs[0].manifest.bad_images
        if bad:
            images = with_noun(bad.count, "damaged image")
            more = f" and {bad.count - len(bad.first):,} more" if bad.count > len(bad.first) else ""
            yield f"--skip-bad left out {images}: {', '.join(bad.first)}{more}"
            return


DOUBTS: Sequence[Doubt] = (
    _not_tried,
    _parts_of_machine,
    _left_out,
    _missed_target,
    _rates_at_edge,
    _reached_at_once,
    _shared_cores,
    _more_hosts,
    _other_batch,
    _other_slow,
    _one_did_it_all,
    _if_any_run("the loss became NaN: {}", _has_diverged),
    _as_many_processes,
    _other_measures,
    _outer_optimizer,
    _drifts,
    _busy_hosts,
    _main_doubt_of_cores,
    _if_any_run(
        "workers or servers came and went: {}; "
        "`membership` and `returned_servers` in summary.json say when",
        _came_and_went,
    ),
    _if_any_run("stopped and resumed, and each start warms up anew: {}", _was_resumed),
    _slowed,
    _hosts_differ,
    _bad_images,
    _if_any_run(
        f"trained for less than {_SHORT_S} s, in which the first steps, slower than all others, "
        "weigh: {}",
        _is_short,
    ),
    _if_any_run(
        "batch norm takes its statistics from one worker's share, "
        "so the mathematics depends on their number: {}",
        lambda run: run.manifest.batch_norm,
    ),
    _if_any_run(
        "workers draw their own dropout masks, so runs differ by chance: {}",
        lambda run: run.manifest.dropout_layers,
    ),
    _minor_doubt_of_cores,
)
