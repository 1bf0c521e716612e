"""What finished runs say: a calibration corrected by jobs that really ran."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.plan.calibration import TRANSPORTS, Calibration, Quantity
from hvdtrain.plan.check import asked, measured_step_s
from hvdtrain.plan.layout import local_part
from hvdtrain.plan.predict import scenario
from hvdtrain.plan.scenario import MIB, Scenario
from hvdtrain.plan.simulate import simulate
from hvdtrain.runs.read import Run, load_run
from hvdtrain.runs.schema import read_server_loads

OF_MESSAGES, OF_WORKERS = ("message_us", "operation_us"), ("send_s_per_gb", "receive_s_per_gb")
OF_SERVERS = ("server_send_s_per_gb", "server_receive_s_per_gb")
LEAST_LOCAL = 0.1  # less is noise: a byte that stays on its host is copied too
MOST_CHANGE = 5.0  # of costs, by what runs say: more is not believed
SPREAD = 1.25  # of costs that runs gave: what one run may be off by
EFFICIENCIES = [0.2 + 0.02 * number for number in range(41)]


def from_runs(base: Calibration, folders: Sequence[Path], bandwidth: float | None) -> Calibration:
    """The calibration with what these runs say: how many cores a host has, the one with fewest; computing from those of
    one process; processor seconds of messages from what all processes of a job took; the share of the wire that is
    reached from how long steps were.

    Args:
        bandwidth: of the hosts' links in Gbit/s.

    Raises:
        UsageError: a run has not finished, or is of another model.
    """
    runs = []
    found = replace(base, bandwidth_gbit=bandwidth or base.bandwidth_gbit)
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
    layers = tuple(
        replace(layer, forward_ms=layer.forward_ms.times(factor), backward_ms=layer.backward_ms.times(factor))
        for layer in base.layers
    )
    return replace(base, layers=layers, fixed_ms=base.fixed_ms.times(factor))


def message_s(job: Scenario) -> float:
    """Processor seconds of all messages of a step, of all processes together."""
    return sum(_parts(job))


def _parts(job: Scenario) -> tuple[float, float, float]:
    """Of all messages of a step, processor seconds of each as such, and of their bytes at workers and at servers."""
    n, of, gigabytes = job.workers, job.transport, job.bytes / 1e9
    sent = gigabytes * job.wire_share
    if not job.servers:
        moved = 2 * (n - 1) / n * sent
        operations = 2 if job.mode == "allreduce" else 2 + job.bytes / 25 / MIB
        each = operations * (of.operation_s + 2 * (n - 1) * of.message_s)
        return n * each, n * moved * (of.send_s_per_gb + of.receive_s_per_gb), 0.0
    messages = max(job.servers, job.bytes / job.bucket_bytes)
    local = local_part(job)
    times = n * (1 - local + local * of.local_share)
    at_workers = times * (sent * of.send_s_per_gb + gigabytes * of.receive_s_per_gb)
    at_servers = times * (sent * of.server_receive_s_per_gb + gigabytes * of.server_send_s_per_gb)
    return n * 4 * messages * of.message_s, at_workers, at_servers


def _with_costs(base: Calibration, runs: Sequence[Run], kind: str, bandwidth: float | None) -> Calibration:
    """What processes take while they wait, and costs of messages as the processor seconds of these runs have them,
    beside that, computing and the optimizer.
    """
    costs = dict(base.transports[kind])

    def changed() -> Calibration:
        return replace(base, transports=base.transports | {kind: dict(costs)})

    if idle := [cores for run in runs for cores in _idle_cores(run)]:
        costs["idle_cores"] = Quantity.of(idle)
    if shares := [share for run in runs for share in _local_shares(_scenario(changed(), run, bandwidth), run)]:
        costs["local_share"] = _said(shares)
    jobs = [(_scenario(changed(), run, bandwidth), run) for run in runs]
    factors = [_factors(job, left) for job, run in jobs if (left := _of_messages(job, run))]
    for names, own in zip((OF_MESSAGES, OF_WORKERS, OF_SERVERS), zip(*factors, strict=True), strict=False):
        for name in names:
            costs[name] = _said(own).times(costs[name].value)
    return changed()


def _said(figures: Sequence[float]) -> Quantity:
    """What runs say of a figure: the range of them, or what one may be off by."""
    middle = statistics.median(figures)
    return Quantity(middle, min([*figures, middle / SPREAD]), max([*figures, middle * SPREAD]))


def _factors(job: Scenario, left: Mapping[int, float]) -> tuple[float, float, float]:
    """How many times as much as expected messages cost as such, and their bytes at workers and at servers."""
    each, at_workers, at_servers = _parts(job)
    whole = _believed(sum(left.values()), each + at_workers + at_servers)
    if not job.servers:
        return whole, whole, whole
    server = sum(seconds for rank, seconds in left.items() if rank < job.servers)
    worker = sum(left.values()) - server
    half = each * whole / 2
    return whole, _believed(worker - half, at_workers), _believed(server - half, at_servers)


def _believed(seconds: float, expected: float) -> float:
    return min(MOST_CHANGE, max(1 / MOST_CHANGE, seconds / expected)) if expected > 0 else 1.0


def _of_messages(job: Scenario, run: Run) -> dict[int, float]:
    """Processor seconds of a step that each process of a run took for messages, by rank; empty where nobody knows."""
    steps, found = run.summary.steps or 0, {}
    for process in run.summary.processes:
        if not steps or not process.cpu_s or process.rank is None:
            return {}
        other = job.transport.idle_cores * (run.summary.wall_s or 0.0) / steps
        if process.rank < job.servers:
            other += job.optimizer_s / job.servers
        else:
            other += job.computing_s + (0.0 if job.servers else job.optimizer_s)
        found[process.rank] = process.cpu_s / steps - other
    return found


def _idle_cores(run: Run) -> list[float]:
    """Cores that servers took in each second without a message, after their first and before they ended."""
    found = []
    for rank in range(run.kind.servers):
        rows = [row for row in read_server_loads(run.folder, rank) if row.bytes_sent or row.bytes_received]
        found += [
            max(0.0, b.cpu_s - a.cpu_s) / (b.time - a.time)
            for a, b in itertools.pairwise(rows[:-1])
            if b.time > a.time and (a.bytes_sent, a.bytes_received) == (b.bytes_sent, b.bytes_received)
        ]
    return found


def _local_shares(job: Scenario, run: Run) -> list[float]:
    """What a byte costs that stays on its host, over one that crosses the network: by how much less processor time
    workers took who have more of the servers on their own host. Nothing where all workers have as many.
    """
    servers = set(range(job.servers))
    on_host = {rank: servers & set(host.ranks) for host in run.manifest.hosts.values() for rank in host.ranks}
    workers = {rank: seconds for rank, seconds in _of_messages(job, run).items() if rank not in servers}
    beside = [len(on_host.get(rank, ())) for rank in workers]
    if not servers or len(set(beside)) < 2:
        return []
    slope, remote = statistics.linear_regression([number / job.servers for number in beside], list(workers.values()))
    each, at_workers, _ = _parts(replace(job, transport=replace(job.transport, local_share=1.0)))
    of_bytes = remote * at_workers / (each / 2 + at_workers)
    return [min(1.0, max(LEAST_LOCAL, 1 + slope / of_bytes))] if of_bytes > 0 else []


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
