"""What a careful reader has to keep in mind: each caveat appears only where the runs give a reason for it."""

import contextlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime

from msgspec import to_builtins

from hvdtrain import modes
from hvdtrain.errors import UsageError
from hvdtrain.formatting import with_noun
from hvdtrain.numerics.slowdown import factor_of_all
from hvdtrain.report.contenders import whole
from hvdtrain.report.fairness import format_value
from hvdtrain.runs.fields import field_value
from hvdtrain.runs.read import Kind, Run, finished_by_kind
from hvdtrain.world.host import differences
from hvdtrain.world.load import beside_others

_SHORT_S = 5
Groups = dict[Kind, list[Run]]
Caveat = Callable[[Groups], str]


def caveats(runs: Sequence[Run]) -> list[str]:
    """The caveats that apply to the finished runs, the most important first."""
    groups = finished_by_kind(runs)
    return [line for caveat in _CAVEATS if (line := caveat(groups))]


def _of(sentence: str, applies: Callable[[Run], bool]) -> Caveat:
    """A caveat about the kinds of which at least one run fulfils the condition; `{}` in the sentence names them."""
    return _each(sentence, lambda kind, runs: kind.label if any(map(applies, runs)) else "")


def _each(sentence: str, told: Callable[[Kind, list[Run]], str], between: str = ", ") -> Caveat:
    """A caveat about the kinds of which there is something to tell, which stands for `{}` in the sentence."""

    def caveat(groups: Groups) -> str:
        listed = between.join(text for kind, runs in groups.items() if (text := told(kind, runs)))
        return sentence.format(listed) if listed else ""

    return caveat


def _is_asynchronous(run: Run) -> bool:
    return run.kind.mode in modes.names() and not modes.declared(run.kind.mode).lockstep


def _restricted(kind: Kind, runs: list[Run]) -> str:
    cores, allowed = runs[0].manifest.hardware.cores, runs[0].manifest.cores_allowed
    is_fewer = cores and allowed and len(allowed) < cores
    return f"{kind.label} {len(allowed or ())} of {with_noun(cores or 0, 'core')}" if is_fewer else ""


def oversubscribed(kind: Kind, runs: list[Run]) -> str:
    """`ps-sync ×2+1: 2 workers × 1 thread and 1 server on 2 cores`; empty where each thread has a core."""
    run = runs[0]
    cores, threads = run.manifest.hardware.cores, run.manifest.threads_per_worker
    if not cores or not threads:
        return ""
    usable = [host.cores_usable for host in run.manifest.hosts.values() if host.cores_usable is not None]
    cores = int(sum(usable)) if usable else cores * (field_value(run, "hardware.hosts") or 1)
    factor = 1.0
    with contextlib.suppress(UsageError):
        factor = factor_of_all(field_value(run, "slow.asked"))  # workers sleep for the rest of that
    if kind.workers * threads / factor + kind.servers <= cores:
        return ""
    servers = f" and {with_noun(kind.servers, 'server')}" if kind.servers else ""
    each = f"{with_noun(kind.workers, 'worker')} × {with_noun(threads, 'thread')}"
    return f"{kind.label}: {each}{servers} on {with_noun(cores, 'core')}"


def _slowed(kind: Kind, runs: list[Run]) -> str:
    achieved: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.manifest.slow.asked != "none":
            for worker, factor in run.manifest.slow.achieved.items():
                achieved[worker].append(factor)
    each = ", ".join(f"worker {worker} {statistics.fmean(of):.2f}" for worker, of in achieved.items())
    return f"{kind.label}: {each}" if each else ""


def _foreign_load(groups: Groups) -> str:
    listed = []
    for kind, runs in groups.items():
        loads = [to_builtins(run.summary.load) for run in runs]
        if busy := [load for load in loads if beside_others(load)]:
            worst = max(busy, key=lambda load: max(host["others_cores"] or 0 for host in load.values()))
            listed.append(f"{kind.label} in {len(busy)} of {len(runs)}, where {beside_others(worst)[0]} at the most")
    return f"Hosts were busy with other work beside these runs: {'; '.join(listed)}." if listed else ""


def _different_hosts(groups: Groups) -> str:
    listed = {line: None for runs in groups.values() for line in differences(to_builtins(runs[0].manifest.hosts))}
    return f"Hosts of one run differ: {'; '.join(listed)}." if listed else ""


def _differing(sentence: str, field: str, and_single: bool = True) -> Caveat:
    """A caveat where kinds have several values of a field, which stand for `{}` in the sentence."""

    def caveat(groups: Groups) -> str:
        kinds = [kind for kind in groups if and_single or kind.is_distributed]
        values = {kind: format_value(field_value(groups[kind][0], field)) for kind in kinds}
        listed = ", ".join(f"{kind.label} {value}" for kind, value in values.items())
        return sentence.format(listed) if len(set(values.values())) > 1 else ""

    return caveat


def _uneven_training(groups: Groups) -> str:
    if len({run.summary.samples for runs in groups.values() for run in whole(runs)}) < 2:
        return ""
    return (
        "The runs did not train on equally many samples, so their last accuracies are not at the same point: "
        "read accuracy from the curves."
    )


def _shared_seeds(groups: Groups) -> str:
    if all(len({run.manifest.seed for run in runs}) == len(runs) for runs in groups.values()):
        return ""
    return "Repeats share a seed: the range shows how much timing varies, not how much training does."


def _uncharged_servers(groups: Groups) -> str:
    if len({kind.servers > 0 for kind in groups}) < 2:
        return ""
    return (
        "Servers are processes beside the workers, with memory and computing of their own (the optimizer "
        "runs there): scaling efficiency is per worker, and does not charge for them; samples/s of a process and "
        "processor time do."
    )


def _spread_in_time(groups: Groups) -> str:
    started = []
    for run in (run for runs in groups.values() for run in runs):
        with contextlib.suppress(ValueError):
            started.append(datetime.fromisoformat(run.manifest.started or "").timestamp())
    hours = (max(started) - min(started)) / 3600 if started else 0
    return (
        f"The first and the last run started {hours:.0f} hours apart: was the machine the same?" if hours > 24 else ""
    )


_CAVEATS: tuple[Caveat, ...] = (
    _of("The loss became NaN: {}.", lambda run: math.isnan(run.summary.val_loss or 0.0)),
    _of(
        "Stopped and resumed: {}. Times are of training alone, and each start warms up anew.",
        lambda run: len(run.manifest.parts) > 1,
    ),
    _of("Workers came and went: {}; the report's table of who was there says when.", lambda run: run.workers_changed),
    _of(
        "A server was killed, and workers waited until it was back: {}.",
        lambda run: bool(run.summary.returned_servers),
    ),
    _uneven_training,
    _foreign_load,
    _each("Workers were made slow, and computed so many times as long, over the whole run: {}.", _slowed, "; "),
    _each("More busy threads than cores, which slows these runs: {}.", oversubscribed, "; "),
    _different_hosts,
    _of(
        "All processes ran on one host: {}. Their messages went through its memory, which costs cores and memory "
        "bandwidth; over a network the comparison can come out differently.",
        lambda run: run.kind.is_distributed and field_value(run, "hardware.hosts") == 1,
    ),
    _differing(
        "Different software carries the messages, which may be a part of the difference: {}.", "backend", False
    ),
    _of(
        "Gradients were applied to weights newer than those they were computed on ({}), so training takes another "
        "path, and another one each time: compare its accuracy and its time to target, not its loss step by step.",
        lambda run: (run.summary.staleness_max or 0) > 0,
    ),
    _of(
        "Each push counts whole, so N pushes move the weights N times as far as one averaged step: {}.",
        lambda run: run.manifest.push_scale == "none" and _is_asynchronous(run),
    ),
    _differing(
        "The learning rate that one gradient is applied with differs: {}. Where each push counts 1/N, N pushes move "
        "the weights as far as one averaged step.", "effective_lr",
    ),
    _uncharged_servers,
    _each("One run only, so no spread is known: {}.", lambda kind, runs: kind.label if len(runs) == 1 else ""),
    _of(
        f"These trained for less than {_SHORT_S} s, in which the first steps, slower than all others, weigh: {{}}.",
        lambda run: not run.manifest.sprint and 0 < (run.summary.wall_s or 0) < _SHORT_S,
    ),
    _differing(
        "Processes could use different numbers of their host's cores, as schedulers give them out by ranks: {}.",
        "hardware.cores_usable",
    ),
    _each("A worker was not allowed on every core of its host: {}.", _restricted),
    _shared_seeds,
    _of(
        "Batch norm takes its statistics from one worker's share of the global batch, so the mathematics depends on "
        "the number of workers; running statistics are averaged over workers before every evaluation.",
        lambda run: str(run.manifest.model).endswith("_bn") or str(run.manifest.model).startswith("resnet"),
    ),
    _of(
        "Dropout is on: workers draw their own masks, so runs differ by chance where the method does not.",
        lambda run: bool(run.manifest.dropout),
    ),
    _spread_in_time,
)  # fmt: skip
