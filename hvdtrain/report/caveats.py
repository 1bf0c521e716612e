"""What a careful reader has to keep in mind: each caveat appears only where the runs give a reason for it."""

import math
from collections.abc import Callable, Sequence
from datetime import datetime

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


def _labels(groups: Groups, applies: Callable[[Run], bool]) -> str:
    """The kinds of which at least one run fulfils the condition."""
    return ", ".join(kind.label for kind, members in groups.items() if any(map(applies, members)))


def _overflowed_steps(groups: Groups) -> str:
    shares = {kind.label: max(run.summary.get("left_out_share") or 0 for run in runs) for kind, runs in groups.items()}
    listed = ", ".join(f"{label} {share:.1%}" for label, share in shares.items() if share)
    return f"Steps that overflowed fp16 changed nothing, and count as steps and samples: {listed}." if listed else ""


def _single_repeats(groups: Groups) -> str:
    if all(len(members) > 1 for members in groups.values()):
        return ""
    alone = _labels({k: m for k, m in groups.items() if len(m) == 1}, lambda run: True)
    return f"One run only, so no spread is known: {alone}."


def _short_runs(groups: Groups) -> str:
    short = _labels(groups, lambda run: 0 < (run.summary.get("wall_s") or 0) < _SHORT_S)
    return (
        f"These trained for less than {_SHORT_S} s, in which the first steps, slower than all others, weigh: {short}."
        if short
        else ""
    )


def _restricted_cores(groups: Groups) -> str:
    listed = []
    for kind, members in groups.items():
        cores, allowed = field_value(members[0], "hardware.cores"), members[0].manifest.get("cores_allowed")
        if isinstance(cores, int) and isinstance(allowed, list) and len(allowed) < cores:
            listed.append(f"{kind.label} {len(allowed)} of {with_noun(cores, 'core')}")
    return f"A worker was not allowed on every core of its host: {', '.join(listed)}." if listed else ""


def _oversubscribed_cores(groups: Groups) -> str:
    listed = []
    for kind, (run, *_) in groups.items():
        cores, threads = field_value(run, "hardware.cores"), run.manifest.get("threads_per_worker")
        if not isinstance(cores, int) or not isinstance(threads, int):
            continue
        hosts = run.manifest.get("hosts") or {}
        usable = [host["cores_usable"] for host in hosts.values() if "cores_usable" in host]
        cores = int(sum(usable)) if usable else cores * max(1, field_value(run, "hardware.hosts") or 1)
        if kind.workers * threads + kind.servers > cores:
            servers = f" and {with_noun(kind.servers, 'server')}" if kind.servers else ""
            each = f"{with_noun(kind.workers, 'worker')} × {with_noun(threads, 'thread')}"
            listed.append(f"{kind.label}: {each}{servers} on {with_noun(cores, 'core')}")
    return f"More busy threads than cores, which slows these runs: {'; '.join(listed)}." if listed else ""


def _foreign_load(groups: Groups) -> str:
    def beside(run: Run) -> list[str]:
        load = run.summary.get("load")
        return beside_others(load) if isinstance(load, dict) else []

    busy = [(kind, sum(bool(beside(run)) for run in runs), len(runs)) for kind, runs in groups.items()]
    listed = [f"{kind.label} (in {count} of {n})" for kind, count, n in busy if count]
    worst = next((lines[0] for runs in groups.values() for run in runs if (lines := beside(run))), "")
    return f"Hosts were busy with other work beside these runs: {', '.join(listed)}; {worst}." if listed else ""


def _different_hosts(groups: Groups) -> str:
    listed = {line: None for runs in groups.values() for line in differences(runs[0].manifest.get("hosts") or {})}
    return f"Hosts of one run differ: {'; '.join(listed)}." if listed else ""


def _one_host(groups: Groups) -> str:
    local = _labels(groups, lambda run: run.kind.mode != "single" and field_value(run, "hardware.hosts") == 1)
    if not local:
        return ""
    return (
        f"All processes ran on one host: {local}. Their messages went through its memory, which costs cores "
        "and memory bandwidth; over a network the comparison can come out differently."
    )


def _different_backends(groups: Groups) -> str:
    backends = {
        kind: format_value(members[0].manifest.get("backend"))
        for kind, members in groups.items()
        if kind.mode != "single"
    }
    if len(set(backends.values())) < 2:
        return ""
    listed = ", ".join(f"{kind.label} {backend}" for kind, backend in backends.items())
    return f"Different software carries the messages, which may be a part of the difference: {listed}."


def _stale_gradients(groups: Groups) -> str:
    stale = _labels(groups, lambda run: (run.summary.get("staleness_max") or 0) > 0)
    if not stale:
        return ""
    return (
        f"Gradients were applied to weights newer than those they were computed on ({stale}), so training "
        "takes another path, and another one each time: compare its accuracy and its time to target, not its "
        "loss step by step."
    )


def _uneven_training(groups: Groups) -> str:
    samples = {format_value(run.summary.get("samples")) for members in groups.values() for run in members}
    if len(samples) < 2:
        return ""
    return (
        "The runs did not train on equally many samples, so their last accuracies are not at the same point: "
        "read accuracy from the curves."
    )


def _unscaled_pushes(groups: Groups) -> str:
    whole = _labels(groups, lambda run: run.manifest.get("push_scale") == "none" and _applies_single_pushes(run.kind))
    return (
        f"Each push counts whole, so N pushes move the weights N times as far as one averaged step: {whole}."
        if whole
        else ""
    )


def _applies_single_pushes(kind: Kind) -> bool:
    return kind.servers > 0 and kind.mode != "ps-sync"


def _different_effective_rates(groups: Groups) -> str:
    rates = {kind: members[0].manifest.get("effective_lr") for kind, members in groups.items()}
    if len(set(map(format_value, rates.values()))) < 2:
        return ""
    listed = ", ".join(f"{kind.label} {format_value(rate)}" for kind, rate in rates.items())
    return (
        f"The learning rate that one gradient is applied with differs: {listed}. Where each push counts 1/N, N "
        "pushes move the weights as far as one averaged step."
    )


def _batch_statistics(groups: Groups) -> str:
    if not any(_has_batch_norm(str(run.manifest.get("model"))) for members in groups.values() for run in members):
        return ""
    return (
        "Batch norm takes its statistics from one worker's share of the global batch, so the mathematics "
        "depends on the number of workers; running statistics are averaged over workers before every "
        "evaluation."
    )


def _has_batch_norm(model: str) -> bool:
    return model.endswith("_bn") or model.startswith("resnet")


def _dropout(groups: Groups) -> str:
    if not any(run.manifest.get("dropout") for members in groups.values() for run in members):
        return ""
    return "Dropout is on: workers draw their own masks, so runs differ by chance where the method does not."


def _shared_seeds(groups: Groups) -> str:
    if all(len({format_value(run.manifest.get("seed")) for run in runs}) == len(runs) for runs in groups.values()):
        return ""
    return "Repeats share a seed: the range shows how much timing varies, not how much training does."


def _diverged(groups: Groups) -> str:
    diverged = _labels(groups, lambda run: math.isnan(run.summary.get("val_loss") or 0.0))
    return f"The loss became NaN: {diverged}." if diverged else ""


def _resumed(groups: Groups) -> str:
    resumed = _labels(groups, lambda run: len(run.starts) > 1)
    return (
        f"Stopped and resumed: {resumed}. Times are of training alone, and each start warms up anew." if resumed else ""
    )


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
            try:
                started.append(datetime.fromisoformat(str(run.manifest.get("started"))).timestamp())
            except ValueError:
                continue
    hours = (max(started) - min(started)) / 3600 if started else 0
    return (
        f"The first and the last run started {hours:.0f} hours apart: was the machine the same?" if hours > 24 else ""
    )


_CAVEATS = (
    _diverged, _resumed, _uneven_training, _overflowed_steps, _foreign_load, _oversubscribed_cores, _different_hosts,
    _one_host, _different_backends, _stale_gradients, _unscaled_pushes, _different_effective_rates, _uncharged_servers,
    _single_repeats, _short_runs, _restricted_cores, _shared_seeds, _batch_statistics, _dropout, _spread_in_time,
)  # fmt: skip
