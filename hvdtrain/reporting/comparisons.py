"""Splits runs into comparisons: runs that are compared with each other."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.base import modes
from hvdtrain.base.errors import UsageError
from hvdtrain.base.numerics.slowdown import among_workers
from hvdtrain.reporting.columns import Setting
from hvdtrain.runs.read import Kind, Run, finished_by_kind, grouped


@dataclass(frozen=True)
class ComparedRuns:
    """The finished runs of one comparison: those of one setting, beside one machine.

    Attributes:
        title: what distinguishes the comparison from others: `vgg16, global batch 64`; empty if
            there are no others.
        runs: the runs.
    """

    title: str
    runs: list[Run]

    @property
    def by_kind(self) -> dict[Kind, list[Run]]:
        return finished_by_kind(self.runs)

    def label(self, kind: Kind) -> str:
        """Returns what distinguishes the runs of a kind from the runs of all comparisons."""
        return ", ".join(filter(None, [kind.label, self.title]))


def split_into_comparisons(runs: Sequence[Run]) -> list[ComparedRuns]:
    """Splits the finished runs by model, global batch, learning rate, and by who was made slow.

    One machine stands beside all settings that it belongs to. With --per-worker its batch is the
    batch of one worker, and with --slow it is slow where the first worker is.
    """
    finished = [run for run in runs if run.is_finished]
    by_setting = grouped(finished, Setting.of)
    beside = {
        setting: _machines_beside(members, finished) for setting, members in by_setting.items()
    }
    placed: set[int] = set()
    for machines in beside.values():
        placed.update(id(run) for run in machines)
    compared = {}
    for setting, members in by_setting.items():
        # A setting of machines alone that stand beside other settings is no comparison.
        if all(id(run) in placed for run in members):
            continue
        machines = [_as_one_machine(run) for run in beside[setting]]
        compared[setting] = _with_parts_of_machine([*_with_one_machine(members), *machines])
    varied = Setting.varied(compared)
    comparisons = []
    for setting in sorted(compared, key=lambda setting: setting.order):
        title = ", ".join(setting.words(name) for name in varied)
        comparisons.append(ComparedRuns(title, compared[setting]))
    return comparisons


def _with_one_machine(members: Sequence[Run]) -> list[Run]:
    """Returns the runs of a setting.

    If some of them ran over several hosts, a ring on one host stands for one machine.
    """
    if not any(run.hosts_used > 1 for run in members):
        return list(members)
    return [_as_one_machine(run) for run in members]


def _with_parts_of_machine(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs of a comparison.

    One process that computed with some of its cores stands for one machine too, beside one that
    had all: fewer threads may be faster. Without that, nothing shows what the machine can do.
    """
    is_whole = any(run.kind.is_one_process and run.kind.family for run in runs)
    if not is_whole:
        return list(runs)
    return [replace(run, one_machine=True) if not run.kind.family else run for run in runs]


def _machines_beside(members: Sequence[Run], finished: Sequence[Run]) -> list[Run]:
    """Returns the runs of other settings that stand for one machine beside these.

    Args:
        members: the runs of a setting.
        finished: all finished runs.
    """
    over_several_hosts = [run for run in members if run.hosts_used > 1]
    distributed = over_several_hosts or [run for run in members if run.kind.is_distributed]
    own_kinds = {run.kind for run in _with_one_machine(members)}
    machines = []
    for run in finished:
        is_ring_as_machine = over_several_hosts and _is_ring_on_one_host(run)
        if run.kind.is_distributed and not is_ring_as_machine:
            continue
        if _as_one_machine(run).kind in own_kinds:
            continue
        if any(_belongs_beside(run, other) for other in distributed):
            machines.append(run)
    return machines


def _is_ring_on_one_host(run: Run) -> bool:
    return run.hosts_used == 1 and run.kind.family == modes.RING


def _as_one_machine(run: Run) -> Run:
    return replace(run, one_machine=True) if _is_ring_on_one_host(run) else run


def _belongs_beside(machine: Run, other: Run) -> bool:
    """Returns whether the run of one machine stands beside a distributed run.

    So it does if it trains the same model by batches as large, in all or for each worker, and is as
    slow as the first worker.
    """
    manifest = machine.manifest
    other_manifest = other.manifest
    if manifest.model != other_manifest.model:
        return False
    batch = manifest.global_batch or 0
    other_batch = other_manifest.global_batch or 0
    is_equal_for_worker = batch * other_manifest.workers == other_batch * manifest.workers
    if batch != other_batch and not is_equal_for_worker:
        return False
    other_slow = other_manifest.slow.asked
    return manifest.slow.asked in (other_slow, _slow_of_first_worker(other_slow))


def _slow_of_first_worker(slow: str) -> str:
    """Returns the part of --slow that is about the first worker; empty if it cannot be read."""
    with contextlib.suppress(UsageError):
        return among_workers(slow, 1)
    return ""
