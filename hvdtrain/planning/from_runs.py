"""What finished runs say: a calibration corrected by jobs that really ran."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdtrain.planning.calibration import LEAST_CORES, Calibration, Quantity
from hvdtrain.planning.check import measured_step_s, question
from hvdtrain.planning.layout import local_part
from hvdtrain.planning.predict import simulate
from hvdtrain.planning.scenario import BUCKET_BYTES, MIB, Scenario
from hvdtrain.runs.read import Run, grouped
from hvdtrain.runs.schema import read_server_loads

# Which costs a run corrects together: of messages as such, and of their bytes at workers and at servers.
OF_SERVERS = ("server_send_s_per_gb", "server_receive_s_per_gb")
COSTS = (("message_us", "operation_us"), ("send_s_per_gb", "receive_s_per_gb"), OF_SERVERS)
LEAST_LOCAL = 0.1  # less is noise: a byte that stays on its host is copied too
MOST_CHANGE = 5.0  # of costs, by what runs say: more is not believed
SPREAD = 1.25  # of costs that runs gave: what one run may be off by
EFFICIENCIES = [0.2 + 0.02 * number for number in range(41)]


def from_runs(base: Calibration, runs: Sequence[Run], bandwidth: float | None) -> Calibration:
    """The calibration with what runs say on hosts whose links have so many Gbit/s: see README.md. UsageError where one
    is of another model, or what it ran on is not known.
    """
    hosts = [host for run in runs for host in run.manifest.hosts.values()]
    cores = min((host.cores_usable for host in hosts if host.cores_usable), default=base.cores_per_host)
    made = replace(
        base, bandwidth_gbit=bandwidth or base.bandwidth_gbit, cores_per_host=max(LEAST_CORES, cores),
        most_workers=max([base.most_workers, *(run.kind.workers for run in runs)]),
        most_servers=max([base.most_servers, *(run.kind.servers for run in runs)]),
        wires=tuple(sorted({run.wire for run in runs if run.kind.servers})) or base.wires,
    )  # fmt: skip
    by_kind = grouped(runs, lambda run: Scenario(run.kind.mode, servers=run.kind.servers, wire=run.wire).carrier)
    machines: dict[int, list[float]] = {0: [], 1: []}  # measured over simulated, by whether they had all cores
    for run in by_kind.get("single", []):
        of_run, asked = question(made, run, None)
        machines[asked.replaces].append(measured_step_s(run) / simulate(of_run.scenario(asked)).step_s)
    if machines[0]:
        made = made.slower(statistics.median(machines[0]))
    if machines[1]:
        speedup = made.of_machine(1).value / statistics.median(machines[1])
        made = replace(made, machine_speedup=Quantity.exactly(speedup).give_or_take(SPREAD))
    for kind in [kind for kind in made.transports if kind in by_kind]:
        # MPI's processes spin while they wait for the wire: what they took is not their messages'.
        waiting = [run for run in by_kind[kind] if run.manifest.backend != "horovod-mpi"]
        made = _with_costs(made, waiting, kind, bandwidth) if waiting else made
        made = _with_efficiency(made, by_kind[kind], kind, bandwidth)
    guessed = [kind for kind in base.made.get("guessed", []) if kind not in by_kind]
    return replace(made, made=base.made | {"runs": [run.name for run in runs], "guessed": guessed})


def scenario_of(base: Calibration, run: Run, bandwidth: float | None = None) -> Scenario:
    made, asked = question(base, run, bandwidth)
    return made.scenario(asked)


def message_seconds(job: Scenario) -> tuple[float, float, float]:
    """Of all messages of a step, processor seconds of each as such, and of their bytes at workers and at servers."""
    n, costs, gigabytes = job.workers, job.transport, job.bytes / 1e9
    sent = gigabytes * job.codec.wire_share
    if not job.servers:
        operations = 2 if job.mode == "allreduce" else 2 + job.bytes / 25 / MIB
        each_us = operations * (costs.operation_us + 2 * (n - 1) * costs.message_us)
        return n * each_us * 1e-6, n * job.around(sent) * (costs.send_s_per_gb + costs.receive_s_per_gb), 0.0
    messages = max(job.servers, job.bytes / BUCKET_BYTES)
    local = local_part(job)
    times = n * (1 - local + local * costs.local_share)
    at_workers = times * (sent * costs.send_s_per_gb + gigabytes * costs.receive_s_per_gb)
    at_servers = times * (sent * costs.server_receive_s_per_gb + gigabytes * costs.server_send_s_per_gb)
    return n * 4 * messages * costs.message_us * 1e-6, at_workers, at_servers


def _with_costs(base: Calibration, runs: Sequence[Run], kind: str, bandwidth: float | None) -> Calibration:
    """With costs of messages as processor seconds of these runs have them, beside waiting, computing, the optimizer."""
    costs = dict(base.transports[kind])
    made = replace(base, transports=base.transports | {kind: costs})  # has what is written into costs
    if idle := [cores for run in runs for cores in _idle_cores(run)]:
        costs["idle_cores"] = Quantity.of(idle)
    if shares := [share for run in runs for share in _local_shares(scenario_of(made, run, bandwidth), run)]:
        costs["local_share"] = _said(shares)
    factors = []
    for run in runs:
        job = scenario_of(made, run, bandwidth)
        if seconds := _taken(job, run):
            factors.append(_factors(job, seconds))
    for names, of_runs in zip(COSTS, zip(*factors, strict=True), strict=False):
        costs |= {name: _said(of_runs).times(costs[name].value) for name in names}
    return made


def _said(figures: Sequence[float]) -> Quantity:
    """What runs say of a figure: the range of them, or what one may be off by."""
    middle = statistics.median(figures)
    return Quantity(middle, min([*figures, middle / SPREAD]), max([*figures, middle * SPREAD]))


def _factors(job: Scenario, seconds: Mapping[int, float]) -> tuple[float, float, float]:
    """How many times as much as expected messages cost as such, and their bytes at workers and at servers, by the
    processor seconds of each rank.
    """
    each, at_workers, at_servers = message_seconds(job)
    whole = _believed(sum(seconds.values()), each + at_workers + at_servers)
    if not job.servers:
        return whole, whole, whole
    of_servers = sum(taken for rank, taken in seconds.items() if rank < job.servers)
    of_workers = sum(seconds.values()) - of_servers
    half = each * whole / 2
    return whole, _believed(of_workers - half, at_workers), _believed(of_servers - half, at_servers)


def _believed(seconds: float, expected: float) -> float:
    return min(MOST_CHANGE, max(1 / MOST_CHANGE, seconds / expected)) if expected > 0 else 1.0


def _taken(job: Scenario, run: Run) -> dict[int, float]:
    """Processor seconds of a step that each process of a run took for messages, by rank; empty where nobody knows."""
    steps, seconds = run.summary.steps or 0, {}
    for process in run.summary.processes:
        if not steps or not process.cpu_s or process.rank is None:
            return {}
        other = job.transport.idle_cores * (run.summary.wall_s or 0.0) / steps
        if process.rank < job.servers:
            other += job.optimizer_s / job.servers
        else:
            other += job.computing_s + (0.0 if job.servers else job.optimizer_s)
        seconds[process.rank] = process.cpu_s / steps - other
    return seconds


def _idle_cores(run: Run) -> list[float]:
    """Cores that servers took in each second without a message, after their first and before they ended."""
    cores = []
    for rank in range(run.kind.servers):
        rows = [row for row in read_server_loads(run.folder, rank) if row.bytes_sent or row.bytes_received]
        for a, b in itertools.pairwise(rows[:-1]):
            if b.time > a.time and (a.bytes_sent, a.bytes_received) == (b.bytes_sent, b.bytes_received):
                cores.append(max(0.0, b.cpu_s - a.cpu_s) / (b.time - a.time))
    return cores


def _local_shares(job: Scenario, run: Run) -> list[float]:
    """What a byte costs that stays on its host, over one that crosses the network: by how much less processor time
    workers took who have more of the servers on their own host. Nothing where all workers have as many.
    """
    servers = set(range(job.servers))
    on_host = {rank: servers & set(host.ranks) for host in run.manifest.hosts.values() for rank in host.ranks}
    workers = {rank: seconds for rank, seconds in _taken(job, run).items() if rank not in servers}
    shares = [len(on_host.get(rank, ())) / job.servers for rank in workers] if servers else []
    if len(set(shares)) < 2:
        return []
    slope, remote = statistics.linear_regression(shares, list(workers.values()))
    each, at_workers, _ = message_seconds(replace(job, transport=replace(job.transport, local_share=1.0)))
    of_bytes = remote * at_workers / (each / 2 + at_workers)
    return [min(1.0, max(LEAST_LOCAL, 1 + slope / of_bytes))] if of_bytes > 0 else []


def _with_efficiency(base: Calibration, runs: Sequence[Run], kind: str, bandwidth: float | None) -> Calibration:
    """The share of the wire with which simulated steps are as long as measured ones, or the known one."""
    measured = [measured_step_s(run) for run in runs]
    found = []
    for share in EFFICIENCIES:
        efficiency = Quantity(share, share * 0.95, min(1.0, share * 1.03))
        tried = replace(base, transports=base.transports | {kind: base.transports[kind] | {"efficiency": efficiency}})
        steps = [simulate(scenario_of(tried, run, bandwidth)).step_s for run in runs]
        off = sum(math.log(a / b) ** 2 for a, b in zip(steps, measured, strict=True))
        found.append((round(off, 4), abs(share - base.transports[kind]["efficiency"].value), tried))
    return min(found, key=lambda one: one[:2])[2]
