"""What a careful reader has to keep in mind: each caveat appears only where the runs give a reason for it."""

import contextlib
import math
from collections.abc import Callable, Sequence
from datetime import datetime

from msgspec import to_builtins

from hvdtrain.report.fairness import field_value, format_value
from hvdtrain.report.formatting import with_noun
from hvdtrain.report.runs import Kind, Run, finished_by_kind
from hvdtrain.world.host import differences
from hvdtrain.world.load import beside_others

_SHORT_S = 5
Groups = dict[Kind, list[Run]]


def caveats(runs: Sequence[Run]) -> list[str]:
    """The caveats that apply to the finished runs, the most important first."""
    groups = finished_by_kind(runs)
    return [line for caveat in _CAVEATS if (line := caveat(groups))]


def _of(sentence: str, applies: Callable[[Run], bool]) -> Callable[[Groups], str]:
    """A caveat about the kinds of which at least one run fulfils the condition; `{}` in the sentence names them."""

    def caveat(groups: Groups) -> str:
        listed = ", ".join(kind.label for kind, members in groups.items() if any(map(applies, members)))
        return sentence.format(listed) if listed else ""

    return caveat


_diverged = _of("The loss became NaN: {}.", lambda run: math.isnan(run.summary.val_loss or 0.0))
_resumed = _of(
    "Stopped and resumed: {}. Times are of training alone, and each start warms up anew.",
    lambda run: len(run.manifest.parts) > 1,
)
_one_host = _of(
    "All processes ran on one host: {}. Their messages went through its memory, which costs cores and memory "
    "bandwidth; over a network the comparison can come out differently.",
    lambda run: run.kind.mode != "single" and field_value(run, "hardware.hosts") == 1,
)
_stale_gradients = _of(
    "Gradients were applied to weights newer than those they were computed on ({}), so training takes another path, "
    "and another one each time: compare its accuracy and its time to target, not its loss step by step.",
    lambda run: (run.summary.staleness_max or 0) > 0,
)
_unscaled_pushes = _of(
    "Each push counts whole, so N pushes move the weights N times as far as one averaged step: {}.",
    lambda run: run.manifest.push_scale == "none" and run.kind.servers > 0 and run.kind.mode != "ps-sync",
)
_short_runs = _of(
    f"These trained for less than {_SHORT_S} s, in which the first steps, slower than all others, weigh: {{}}.",
    lambda run: 0 < (run.summary.wall_s or 0) < _SHORT_S,
)
_batch_statistics = _of(
    "Batch norm takes its statistics from one worker's share of the global batch, so the mathematics depends on the "
    "number of workers; running statistics are averaged over workers before every evaluation.",
    lambda run: str(run.manifest.model).endswith("_bn") or str(run.manifest.model).startswith("resnet"),
)
_dropout = _of(
    "Dropout is on: workers draw their own masks, so runs differ by chance where the method does not.",
    lambda run: bool(run.manifest.dropout),
)


def _overflowed_steps(groups: Groups) -> str:
    shares = {kind.label: max(run.summary.left_out_share or 0 for run in runs) for kind, runs in groups.items()}
    listed = ", ".join(f"{label} {share:.1%}" for label, share in shares.items() if share)
    return f"Steps that overflowed fp16 changed nothing, and count as steps and samples: {listed}." if listed else ""


def _single_repeats(groups: Groups) -> str:
    alone = ", ".join(kind.label for kind, members in groups.items() if len(members) == 1)
    return f"One run only, so no spread is known: {alone}." if alone else ""


def _restricted_cores(groups: Groups) -> str:
    listed = []
    for kind, members in groups.items():
        cores, allowed = members[0].manifest.hardware.cores, members[0].manifest.cores_allowed
        if cores and allowed and len(allowed) < cores:
            listed.append(f"{kind.label} {len(allowed)} of {with_noun(cores, 'core')}")
    return f"A worker was not allowed on every core of its host: {', '.join(listed)}." if listed else ""


def _oversubscribed_cores(groups: Groups) -> str:
    listed = []
    for kind, (run, *_) in groups.items():
        cores, threads = run.manifest.hardware.cores, run.manifest.threads_per_worker
        if not cores or not threads:
            continue
        usable = [host.cores_usable for host in run.manifest.hosts.values() if host.cores_usable is not None]
        cores = int(sum(usable)) if usable else cores * (field_value(run, "hardware.hosts") or 1)
        if kind.workers * threads + kind.servers > cores:
            servers = f" and {with_noun(kind.servers, 'server')}" if kind.servers else ""
            each = f"{with_noun(kind.workers, 'worker')} × {with_noun(threads, 'thread')}"
            listed.append(f"{kind.label}: {each}{servers} on {with_noun(cores, 'core')}")
    return f"More busy threads than cores, which slows these runs: {'; '.join(listed)}." if listed else ""


def _foreign_load(groups: Groups) -> str:
    def beside(run: Run) -> list[str]:
        return beside_others(to_builtins(run.summary.load))

    busy = [(kind, sum(bool(beside(run)) for run in runs), len(runs)) for kind, runs in groups.items()]
    listed = [f"{kind.label} (in {count} of {n})" for kind, count, n in busy if count]
    worst = next((lines[0] for runs in groups.values() for run in runs if (lines := beside(run))), "")
    return f"Hosts were busy with other work beside these runs: {', '.join(listed)}; {worst}." if listed else ""


def _different_hosts(groups: Groups) -> str:
    listed = {line: None for runs in groups.values() for line in differences(to_builtins(runs[0].manifest.hosts))}
    return f"Hosts of one run differ: {'; '.join(listed)}." if listed else ""


def _different_backends(groups: Groups) -> str:
    backends = {
        kind: format_value(members[0].manifest.backend) for kind, members in groups.items() if kind.mode != "single"
    }
    if len(set(backends.values())) < 2:
        return ""
    listed = ", ".join(f"{kind.label} {backend}" for kind, backend in backends.items())
    return f"Different software carries the messages, which may be a part of the difference: {listed}."


def _uneven_training(groups: Groups) -> str:
    if len({run.summary.samples for members in groups.values() for run in members}) < 2:
        return ""
    return (
        "The runs did not train on equally many samples, so their last accuracies are not at the same point: "
        "read accuracy from the curves."
    )


def _different_effective_rates(groups: Groups) -> str:
    rates = {kind: members[0].manifest.effective_lr for kind, members in groups.items()}
    if len(set(map(format_value, rates.values()))) < 2:
        return ""
    listed = ", ".join(f"{kind.label} {format_value(rate)}" for kind, rate in rates.items())
    return (
        f"The learning rate that one gradient is applied with differs: {listed}. Where each push counts 1/N, N "
        "pushes move the weights as far as one averaged step."
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
    for members in groups.values():
        for run in members:
            with contextlib.suppress(ValueError):
                started.append(datetime.fromisoformat(run.manifest.started or "").timestamp())
    hours = (max(started) - min(started)) / 3600 if started else 0
    return (
        f"The first and the last run started {hours:.0f} hours apart: was the machine the same?" if hours > 24 else ""
    )


_CAVEATS = (
    _diverged, _resumed, _uneven_training, _overflowed_steps, _foreign_load, _oversubscribed_cores, _different_hosts,
    _one_host, _different_backends, _stale_gradients, _unscaled_pushes, _different_effective_rates, _uncharged_servers,
    _single_repeats, _short_runs, _restricted_cores, _shared_seeds, _batch_statistics, _dropout, _spread_in_time,
)  # fmt: skip
