"""What a careful reader has to keep in mind: each line is said only where the runs make it true."""

import math
from collections.abc import Callable, Sequence
from datetime import datetime

from hvdtrain.report.answer import RING
from hvdtrain.report.cells import count
from hvdtrain.report.fairness import show, value
from hvdtrain.report.runs import Kind, Run, grouped

_SHORT_S = 5
Groups = dict[Kind, list[Run]]


def caveats(runs: Sequence[Run]) -> list[str]:
    """The lines that apply to the finished runs, the ones that matter most first."""
    groups = grouped(runs)
    return [line for say in _SAYINGS if (line := say(groups))]


def _labels(groups: Groups, where: Callable[[Run], bool]) -> str:
    return ", ".join(kind.label for kind, members in groups.items() if any(map(where, members)))


def _left_out(groups: Groups) -> str:
    shares = {kind.label: max(run.summary.get("left_out_share") or 0 for run in runs) for kind, runs in groups.items()}
    told = ", ".join(f"{label} {share:.1%}" for label, share in shares.items() if share)
    return f"Steps that overflowed fp16 changed nothing, and count as steps and samples: {told}." if told else ""


def _few_repeats(groups: Groups) -> str:
    if all(len(members) > 1 for members in groups.values()):
        return ""
    alone = _labels({k: m for k, m in groups.items() if len(m) == 1}, lambda run: True)
    return f"One run only, so no spread is known: {alone}."


def _short(groups: Groups) -> str:
    short = _labels(groups, lambda run: 0 < (run.summary.get("wall_s") or 0) < _SHORT_S)
    return (
        f"These trained for less than {_SHORT_S} s, in which the first steps, slower than all others, weigh: {short}."
        if short
        else ""
    )


def _bound(groups: Groups) -> str:
    told = []
    for kind, members in groups.items():
        cores, allowed = value(members[0], "hardware.cores"), members[0].manifest.get("cores_allowed")
        if isinstance(cores, int) and isinstance(allowed, list) and len(allowed) < cores:
            told.append(f"{kind.label} {len(allowed)} of {count(cores, 'core')}")
    return f"A worker was not allowed on every core of its host: {', '.join(told)}." if told else ""


def _crowded(groups: Groups) -> str:
    told = []
    for kind, (run, *_) in groups.items():
        cores, threads = value(run, "hardware.cores"), run.manifest.get("threads_per_worker")
        if not isinstance(cores, int) or not isinstance(threads, int):
            continue
        cores *= max(1, value(run, "hardware.hosts") or 1)
        if kind.workers * threads + kind.servers > cores:
            servers = f" and {count(kind.servers, 'server')}" if kind.servers else ""
            each = f"{count(kind.workers, 'worker')} × {count(threads, 'thread')}"
            told.append(f"{kind.label}: {each}{servers} on {count(cores, 'core')}")
    return f"More busy threads than cores, which slows these runs: {'; '.join(told)}." if told else ""


def _one_host(groups: Groups) -> str:
    local = _labels(groups, lambda run: run.kind.mode != "single" and value(run, "hardware.hosts") == 1)
    if not local:
        return ""
    return (
        f"All processes ran on one host: {local}. Their messages went through its memory, which costs cores "
        "and memory bandwidth; over a network the comparison can come out differently."
    )


def _backends(groups: Groups) -> str:
    backends = {
        kind: show(members[0].manifest.get("backend")) for kind, members in groups.items() if kind.mode != "single"
    }
    if len(set(backends.values())) < 2:
        return ""
    told = ", ".join(f"{kind.label} {backend}" for kind, backend in backends.items())
    return f"Different software carries the messages, which may be a part of the difference: {told}."


def _asynchronous(groups: Groups) -> str:
    late = _labels(groups, lambda run: (run.summary.get("staleness_max") or 0) > 0)
    if not late:
        return ""
    return (
        f"Gradients were applied to weights newer than those they were computed on ({late}), so training "
        "takes another path, and another one each time: compare its accuracy and its time to target, not its "
        "loss step by step."
    )


def _uneven_training(groups: Groups) -> str:
    samples = {show(run.summary.get("samples")) for members in groups.values() for run in members}
    if len(samples) < 2:
        return ""
    return (
        "The runs did not train on equally many samples, so their last accuracies are not at the same point: "
        "read accuracy from the curves."
    )


def _push_scale(groups: Groups) -> str:
    whole = _labels(groups, lambda run: run.manifest.get("push_scale") == "none" and _is_unaveraged(run.kind))
    return (
        f"Each push counts whole, so N pushes move the weights N times as far as one averaged step: {whole}."
        if whole
        else ""
    )


def _is_unaveraged(kind: Kind) -> bool:
    return kind.servers > 0 and kind.mode != "ps-sync"


def _effective_rates(groups: Groups) -> str:
    rates = {kind: members[0].manifest.get("effective_lr") for kind, members in groups.items()}
    if len(set(map(show, rates.values()))) < 2:
        return ""
    told = ", ".join(f"{kind.label} {show(rate)}" for kind, rate in rates.items())
    return (
        f"The learning rate that one gradient is applied with differs: {told}. Where each push counts 1/N, N "
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


def _same_seed(groups: Groups) -> str:
    if all(len({show(run.manifest.get("seed")) for run in runs}) == len(runs) for runs in groups.values()):
        return ""
    return "Repeats share a seed: the range shows how much timing varies, not how much training does."


def _diverged(groups: Groups) -> str:
    lost = _labels(groups, lambda run: math.isnan(run.summary.get("val_loss") or 0.0))
    return f"The loss became NaN: {lost}." if lost else ""


def _resumed(groups: Groups) -> str:
    resumed = _labels(groups, lambda run: len(run.parts) > 1)
    return (
        f"Stopped and resumed: {resumed}. Times are of training alone, and each start warms up anew." if resumed else ""
    )


def _servers_work(groups: Groups) -> str:
    if not any(kind.servers for kind in groups) or not any(kind.mode in (*RING, "single") for kind in groups):
        return ""
    return (
        "Servers are processes beside the workers, with memory and computing of their own (the optimizer "
        "runs there): scaling efficiency is per worker, and does not charge for them."
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


_SAYINGS = (
    _diverged, _resumed, _uneven_training, _left_out, _crowded, _one_host, _backends, _asynchronous, _push_scale,
    _effective_rates, _servers_work, _few_repeats, _short, _bound, _same_seed, _batch_statistics, _dropout,
    _spread_in_time,
)  # fmt: skip
