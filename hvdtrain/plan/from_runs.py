"""What finished runs say: a calibration corrected by jobs that really ran."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.plan.calibration import TRANSPORTS, Calibration, Quantity
from hvdtrain.plan.check import asked, measured_step_s
from hvdtrain.plan.predict import scenario
from hvdtrain.plan.scenario import MIB, Scenario
from hvdtrain.plan.simulate import simulate
from hvdtrain.runs.read import Run, load_run

COSTS = (
    "send_s_per_gb", "receive_s_per_gb", "server_send_s_per_gb", "server_receive_s_per_gb",
    "message_us", "operation_us",
)  # fmt: skip
MOST_CHANGE = 5.0  # of costs, by what runs say: more is not believed
SPREAD = 1.25  # of costs that runs gave: what one run may be off by
EFFICIENCIES = [0.2 + 0.02 * number for number in range(41)]


def from_runs(base: Calibration, folders: Sequence[Path], bandwidth: float | None, one_machine: bool) -> Calibration:
    """The calibration with what these runs say: how many cores a host has, the one with fewest; computing from those of
    one process; processor seconds of messages from what all processes of a job took; the share of the wire that is
    reached from how long steps were.

    Args:
        bandwidth: of the hosts' links in Gbit/s.
        one_machine: the hosts share one machine's cores.

    Raises:
        UsageError: a run has not finished, or is of another model.
    """
    runs = []
    found = replace(base, hosts_share_cores=one_machine, bandwidth_gbit=bandwidth or base.bandwidth_gbit)
    for folder in folders:
        run = load_run(folder)
        if run.problem:
            raise UsageError(f"{folder}: {run.problem}")
        asked(found, run, bandwidth)
        runs.append(run)
    cores = [host.cores_usable for run in runs for host in run.manifest.hosts.values() if host.cores_usable]
    found = replace(found, cores_per_host=min(cores, default=found.cores_per_host))
    if single := [run for run in runs if run.kind.mode == "single"]:
        found = _computing(found, single)
    for kind in TRANSPORTS:
        if own := [run for run in runs if _kind(run) == kind]:
            # MPI's processes spin while they wait for the wire: what they took is not their messages'.
            waiting = [run for run in own if run.manifest.backend != "horovod-mpi"]
            found = _with_costs(found, waiting, kind, bandwidth) if waiting else found
            found = _with_efficiency(found, own, kind, bandwidth)
    return replace(
        found, most_workers=max([base.most_workers, *(run.kind.workers for run in runs)]),
        most_servers=max([base.most_servers, *(run.kind.servers for run in runs)]),
        made=base.made | {
            "runs": [run.name for run in runs],
            "guessed": [kind for kind in base.made.get("guessed", []) if kind not in map(_kind, runs)],
        },
    )  # fmt: skip


def _kind(run: Run) -> str:
    return "ps" if run.kind.servers else run.kind.mode


def _scenario(base: Calibration, run: Run, bandwidth: float | None) -> Scenario:
    question, rate = asked(base, run, bandwidth)
    return scenario(base, question, run.kind.mode, run.kind.workers, run.kind.servers, rate)


def _computing(base: Calibration, runs: Sequence[Run]) -> Calibration:
    """Layers as long as runs of one process had them, in all."""
    ratios = [measured_step_s(run) / simulate(_scenario(base, run, None)).step_s for run in runs]
    factor = statistics.median(ratios)
    layers = tuple((name, size, f.times(factor), b.times(factor)) for name, size, f, b in base.layers)
    return replace(base, layers=layers, fixed_ms=base.fixed_ms.times(factor))


def message_s(job: Scenario) -> float:
    """Processor seconds of all messages of a step, of all processes together."""
    n, of, gigabytes = job.workers, job.transport, job.bytes / 1e9
    sent = gigabytes * job.wire_share
    if not job.servers:
        moved = 2 * (n - 1) / n * sent
        operations = 2 if job.mode == "allreduce" else 2 + job.bytes / 25 / MIB
        each = operations * (of.operation_s + 2 * (n - 1) * of.message_s)
        return n * (each + moved * (of.send_s_per_gb + of.receive_s_per_gb))
    messages = max(job.servers, job.bytes / job.bucket_bytes)
    at_worker = sent * of.send_s_per_gb + gigabytes * of.receive_s_per_gb
    at_servers = sent * of.server_receive_s_per_gb + gigabytes * of.server_send_s_per_gb
    return n * (4 * messages * of.message_s + at_worker + at_servers)


def _with_costs(base: Calibration, runs: Sequence[Run], kind: str, bandwidth: float | None) -> Calibration:
    """Costs of messages as the processor seconds of these runs have them, beside computing and the optimizer."""
    factors = []
    for run in runs:
        job, steps = _scenario(base, run, bandwidth), run.summary.steps or 0
        used = sum(process.cpu_s for process in run.summary.processes)
        if steps and used and (expected := message_s(job)) > 0:
            updates = 1 if job.servers else job.workers
            left = used / steps - job.workers * job.computing_s - updates * job.optimizer_s
            factors.append(min(MOST_CHANGE, max(1 / MOST_CHANGE, left / expected)))
    if not factors:
        return base
    factor = statistics.median(factors)

    def moved_by(q: Quantity) -> Quantity:
        ends = min([*factors, factor / SPREAD]), max([*factors, factor * SPREAD])
        return Quantity(q.value * factor, q.value * ends[0], q.value * ends[1])

    moved = {name: moved_by(q) if name in COSTS else q for name, q in base.transports[kind].items()}
    return replace(base, transports=base.transports | {kind: moved})


def _with_efficiency(base: Calibration, runs: Sequence[Run], kind: str, bandwidth: float | None) -> Calibration:
    """The share of the wire with which simulated steps are as long as measured ones, or the known one."""
    measured = [measured_step_s(run) for run in runs]
    known = base.transports[kind]["efficiency"]
    best = (math.inf, base)
    for efficiency in sorted(EFFICIENCIES, key=lambda share: abs(share - known.value)):
        its = Quantity(efficiency, efficiency * 0.95, min(1.0, efficiency * 1.03))
        tried = replace(base, transports=base.transports | {kind: base.transports[kind] | {"efficiency": its}})
        steps = [simulate(_scenario(tried, run, bandwidth)).step_s for run in runs]
        off = sum(math.log(a / b) ** 2 for a, b in zip(steps, measured, strict=True))
        if off < best[0] - 1e-4:
            best = off, tried
    return best[1]
