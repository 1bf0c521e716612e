"""Corrects a calibration by finished runs."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple

from hvdtrain.planning.calibration import LEAST_CORES, Calibration, Quantity
from hvdtrain.planning.check import job_of_run, measured_step_s
from hvdtrain.planning.layout import local_part
from hvdtrain.planning.predict import simulate
from hvdtrain.planning.ring import averages_of_exchange
from hvdtrain.planning.scenario import Scenario
from hvdtrain.runs.read import Run, grouped
from hvdtrain.runs.schema import read_server_loads

SINGLE = "single"  # the mode of one process, and the name of its transport
# A smaller share is noise: a byte that stays on its host is copied too.
LEAST_LOCAL = 0.1
# Runs are not believed to change costs by more.
MOST_CHANGE = 5.0
# What one run may be off by, in costs.
SPREAD = 1.25
# Runs that are missed by more show that something else is wrong, and correct nothing.
MOST_BIAS = 1.3
# What messages are tried to cost, in times of what they are known to, where runs at rates as far
# apart tell it.
COSTS = [2 ** (number / 2) for number in range(-4, 5)]
TWO_RATES = 1.5
EFFICIENCIES = [0.2 + 0.02 * number for number in range(41)]
# One efficiency of so many is tried first, then those around the best of them.
STRIDE = 5


class MessageCosts(NamedTuple):
    """Processor seconds of all messages of an exchange, or factors of these.

    Attributes:
        each: of messages as such.
        at_workers, at_servers: of their bytes.
    """

    each: float
    at_workers: float
    at_servers: float


# The fields of a transport that a run corrects by each field of MessageCosts.
CORRECTED = (
    ("message_us", "operation_us"),
    ("send_s_per_gb", "receive_s_per_gb"),
    ("server_send_s_per_gb", "server_receive_s_per_gb"),
)


def from_runs(base: Calibration, runs: Sequence[Run], bandwidth: float | None) -> Calibration:
    """Returns a calibration corrected by runs: see README.md.

    Args:
        bandwidth: of the links of the runs' hosts, in Gbit/s.

    Raises:
        UsageError: a run is of another model, or what it ran on is not known.
    """
    hosts = chain.from_iterable(run.manifest.hosts.values() for run in runs)
    known_cores = [host.cores_usable for host in hosts if host.cores_usable]
    cores = min(known_cores, default=base.cores_per_host)
    if runs and all(run.on_gpu for run in runs):
        base = replace(base, device="cuda")  # computing took no processor time from messages
    calibration = replace(
        base.on_hosts(max(LEAST_CORES, cores), base.workers_per_host, _threads(runs, base)),
        bandwidth_gbit=bandwidth or base.bandwidth_gbit,
        most_workers=max([base.most_workers, *(run.kind.workers for run in runs)]),
        most_servers=max([base.most_servers, *(run.kind.servers for run in runs)]),
        wires=tuple(sorted({run.wire for run in runs if run.kind.servers})) or base.wires,
    )
    by_transport = grouped(runs, transport_name)
    calibration = with_computing(calibration, by_transport.get(SINGLE, []))
    for name in calibration.transports:
        of_transport = by_transport.get(name, [])
        # Processes that spin while they wait do not show what messages cost.
        waiting = [run for run in of_transport if not run.spins]
        if waiting:
            calibration = _with_costs(calibration, waiting, name, bandwidth)
        if of_transport:
            calibration = _with_efficiency(calibration, of_transport, name, bandwidth)
    calibration = replace(calibration, bias=_biases(calibration, runs, bandwidth))
    left_nothing = [run for run in runs if _leaves_nothing(calibration, run, bandwidth)]
    told = {transport_name(run) for run in runs if run not in left_nothing}
    made = base.made | {
        "runs": [run.name for run in runs],
        "left_nothing": [run.name for run in left_nothing],
        "guessed": [name for name in base.made.get("guessed", []) if name not in told],
    }
    return replace(calibration, made=made)


def _biases(
    calibration: Calibration, runs: Sequence[Run], bandwidth: float | None
) -> dict[str, float]:
    """Returns the factor by which the runs of each distributed mode are predicted too slow."""
    factors: dict[str, list[float]] = {}
    for run in runs:
        if run.kind.is_distributed:
            simulated = simulate(scenario_of(calibration, run, bandwidth))
            factor = simulated.step_s / measured_step_s(run)
            factors.setdefault(run.kind.mode, []).append(factor)
    biases = {}
    for mode, of_mode in factors.items():
        bias = statistics.geometric_mean(of_mode)
        if bias < MOST_BIAS and 1 / bias < MOST_BIAS:
            biases[mode] = round(bias, 4)
    return biases


def _threads(runs: Sequence[Run], base: Calibration) -> int:
    """Returns the threads with which all distributed runs computed, else those of the calibration."""
    threads = {run.manifest.threads_per_worker for run in runs if run.kind.is_distributed}
    if len(threads) == 1:
        return threads.pop() or base.threads_per_worker
    return base.threads_per_worker


def transport_name(run: Run) -> str:
    """Returns the key of a run's costs in a calibration's `transports`."""
    return Scenario(run.kind.mode, servers=run.kind.servers, wire=run.wire).transport_name


def scenario_of(base: Calibration, run: Run, bandwidth: float | None = None) -> Scenario:
    """Returns the job that a run was, with what its steps and messages cost."""
    calibration, job = job_of_run(base, run, bandwidth)
    return calibration.with_costs(job)


def with_computing(base: Calibration, runs: Sequence[Run]) -> Calibration:
    """Returns the calibration with computing as runs of one process tell it."""
    # measured over simulated
    as_worker = []
    with_all_cores = []
    for run in runs:
        calibration, job = job_of_run(base, run, None)
        times = measured_step_s(run) / simulate(calibration.with_costs(job)).step_s
        if job.replaces:
            with_all_cores.append(times)
        else:
            as_worker.append(times)
    corrected = base
    if as_worker:
        corrected = corrected.slower(statistics.median(as_worker))
    if with_all_cores:
        speedup = corrected.speedup_of_machine(1).value / statistics.median(with_all_cores)
        machine_speedup = Quantity.exactly(speedup).give_or_take(SPREAD)
        corrected = replace(corrected, machine_speedup=machine_speedup)
    return corrected


def message_seconds(job: Scenario) -> MessageCosts:
    """Returns what the messages of an exchange are expected to cost.

    There is an exchange in each step, or one in a round of local steps.
    """
    n = job.workers
    costs = job.transport
    gigabytes = job.bytes / 1e9
    sent = gigabytes * job.codec.wire_share
    if not job.servers:
        averages = averages_of_exchange(job)
        # A sharded ring has a reduce-scatter and an all-gather in place of an all-reduce.
        operations = 2 * averages if job.shards_optimizer else averages
        each_us = operations * costs.operation_us + averages * 2 * (n - 1) * costs.message_us
        s_per_gb = costs.send_s_per_gb + costs.receive_s_per_gb
        return MessageCosts(n * each_us * 1e-6, n * job.ring_bytes(sent) * s_per_gb, 0.0)
    messages = max(job.servers, job.bytes / job.bucket_bytes)
    local = local_part(job)
    times = n * (1 - local + local * costs.local_share)
    at_worker = sent * costs.send_s_per_gb + gigabytes * costs.receive_s_per_gb
    at_servers = sent * costs.server_receive_s_per_gb + gigabytes * costs.server_send_s_per_gb
    each = n * 4 * messages * costs.message_us * 1e-6
    return MessageCosts(each, times * at_worker, times * at_servers)


def _with_costs(
    base: Calibration, runs: Sequence[Run], name: str, bandwidth: float | None
) -> Calibration:
    """Returns the calibration with costs of messages as the processor seconds of runs tell them.

    These are beside waiting, computing and the optimizer.

    Args:
        name: of the transport.
    """
    calibration = base
    idle_cores = []
    for run in runs:
        idle_cores += _idle_cores(run)
    if idle_cores:
        calibration = calibration.with_transport(name, {"idle_cores": Quantity.of(idle_cores)})
    local_shares = []
    for run in runs:
        local_shares += _local_shares(scenario_of(calibration, run, bandwidth), run)
    if local_shares:
        calibration = calibration.with_transport(name, {"local_share": _told(local_shares)})
    factors = []
    for run in runs:
        job = scenario_of(calibration, run, bandwidth)
        seconds = _mean_seconds_of_messages(job, run)
        if _of_workers(job, seconds) > 0:
            factors.append(factors_of_messages(job, seconds))
    return with_factors(calibration, name, factors) if factors else calibration


def with_factors(base: Calibration, name: str, factors: Sequence[MessageCosts]) -> Calibration:
    """Returns the calibration in which messages of a transport cost so many times as much.

    Args:
        name: of the transport.
        factors: of each run.
    """
    known = base.transports[name]
    costs = {}
    for fields, factors_of_runs in zip(CORRECTED, zip(*factors, strict=True), strict=True):
        for field in fields:
            costs[field] = _told(factors_of_runs).times(known[field].value)
    return base.with_transport(name, costs)


def _told(figures: Sequence[float]) -> Quantity:
    """Returns what runs tell of a figure: the range of them, or what one may be off by."""
    middle = statistics.median(figures)
    return Quantity(middle, min([*figures, middle / SPREAD]), max([*figures, middle * SPREAD]))


def factors_of_messages(job: Scenario, seconds: Mapping[int, float]) -> MessageCosts:
    """Returns how many times as much as expected messages cost.

    Args:
        seconds: processor seconds of an exchange's messages, by rank.
    """
    each, at_workers, at_servers = message_seconds(job)
    of_all = sum(seconds.values())
    whole = _believed(of_all, each + at_workers + at_servers)
    if not job.servers:
        return MessageCosts(whole, whole, whole)
    of_workers = _of_workers(job, seconds)
    of_servers = of_all - of_workers
    # Workers and servers have half of the messages each.
    half = each * whole / 2
    return MessageCosts(
        whole,
        _believed(of_workers - half, at_workers),
        _believed(of_servers - half, at_servers),
    )


def _believed(seconds: float, expected: float) -> float:
    """Returns seconds over expected ones, within what runs are believed."""
    if expected <= 0:
        return 1.0
    return min(MOST_CHANGE, max(1 / MOST_CHANGE, seconds / expected))


def seconds_of_messages(job: Scenario, cpu_s: Mapping[int, float]) -> dict[int, float]:
    """Returns the processor seconds of an exchange's messages, by rank.

    They are what is left beside computing and the optimizer.

    Args:
        cpu_s: processor seconds of a step, by rank.
    """
    seconds = {}
    for rank, of_step in cpu_s.items():
        other_s = job.worker_processor_s
        if rank < job.servers:
            other_s = job.server_optimizer_s / job.servers
        seconds[rank] = job.local_steps * of_step - other_s
    return seconds


def _mean_seconds_of_messages(job: Scenario, run: Run) -> dict[int, float]:
    """Returns the processor seconds that an exchange's messages took in a run, by rank, without
    those of waiting.

    Empty where nobody knows.
    """
    steps = run.summary.steps or 0
    idle_s = job.transport.idle_cores * (run.summary.wall_s or 0.0)
    cpu_s: dict[int, float] = {}
    for process in run.summary.processes:
        if not steps or not process.cpu_s or process.rank is None:
            return {}
        cpu_s[process.rank] = (process.cpu_s - idle_s) / steps
    return seconds_of_messages(job, cpu_s)


def _of_workers(job: Scenario, seconds: Mapping[int, float]) -> float:
    """Returns the sum of the workers' seconds of messages, of those of all ranks."""
    return sum(rank_s for rank, rank_s in seconds.items() if rank >= job.servers)


def _leaves_nothing(calibration: Calibration, run: Run, bandwidth: float | None) -> bool:
    """Returns whether computing and the optimizer alone would take all processor time of a run's
    workers.

    All threads of a worker count as busy in forward and backward, though some may have waited.
    """
    if not run.kind.is_distributed or run.spins:
        return False
    job = scenario_of(calibration, run, bandwidth)
    seconds = _mean_seconds_of_messages(job, run)
    return bool(seconds) and _of_workers(job, seconds) <= 0


def _idle_cores(run: Run) -> list[float]:
    """Returns the cores that servers used in each second without a message, after their first
    message and before their end.
    """
    cores = []
    for rank in range(run.kind.servers):
        loads = read_server_loads(run.folder, rank)
        after_first = [load for load in loads if load.bytes_sent or load.bytes_received]
        for earlier, later in pairwise(after_first[:-1]):
            bytes_before = (earlier.bytes_sent, earlier.bytes_received)
            is_idle = bytes_before == (later.bytes_sent, later.bytes_received)
            if is_idle and later.time > earlier.time:
                used_s = max(0.0, later.cpu_s - earlier.cpu_s)
                cores.append(used_s / (later.time - earlier.time))
    return cores


def _local_shares(job: Scenario, run: Run) -> list[float]:
    """Returns what a byte that stays on its host costs, over a byte that crosses the network.

    This is from the processor time that workers needed less if more of the servers were on their
    host. Empty where all workers have as many.
    """
    servers = set(range(job.servers))
    servers_beside = {}
    for host in run.manifest.hosts.values():
        for rank in host.ranks:
            servers_beside[rank] = len(servers & set(host.ranks))
    seconds = _mean_seconds_of_messages(job, run)
    workers = [rank for rank in seconds if rank not in servers]
    if not servers or _of_workers(job, seconds) <= 0:
        return []
    parts = [servers_beside.get(rank, 0) / job.servers for rank in workers]
    if len(set(parts)) < 2:
        return []
    slope, remote_s = statistics.linear_regression(parts, [seconds[rank] for rank in workers])
    all_remote = replace(job.transport, local_share=1.0)
    each, at_workers, _ = message_seconds(replace(job, transport=all_remote))
    of_bytes = remote_s * at_workers / (each / 2 + at_workers)
    if of_bytes <= 0:
        return []
    return [min(1.0, max(LEAST_LOCAL, 1 + slope / of_bytes))]


def _with_efficiency(
    base: Calibration, runs: Sequence[Run], name: str, bandwidth: float | None
) -> Calibration:
    """Returns the calibration with the efficiency with which simulated steps are as long as
    measured ones.

    Where processor time does not tell what messages cost, as over MPI or where nothing is left for
    messages, runs at two rates tell it from the efficiency. Of several that are equally good it is
    the one next to what is known.
    """
    measured = [measured_step_s(run) for run in runs]
    known = base.transports[name]["efficiency"].value
    is_silent = [run.spins or _leaves_nothing(base, run, bandwidth) for run in runs]
    costs_are_open = all(is_silent) and _has_two_rates(base, runs, bandwidth)
    costs = COSTS if costs_are_open else [1.0]

    def calibration_with(share: float, times: float) -> Calibration:
        calibration = base.with_transport(name, {"efficiency": efficiency_around(share)})
        return calibration.with_messages([name], times)

    def miss(tried: tuple[float, float]) -> tuple[float, float]:
        """Returns by how much simulated steps miss the measured ones, and the change tried."""
        share, times = tried
        calibration = calibration_with(share, times)
        simulated = [simulate(scenario_of(calibration, run, bandwidth)).step_s for run in runs]
        errors = [math.log(a / b) for a, b in zip(simulated, measured, strict=True)]
        change = abs(share - known) + abs(math.log(times))
        return round(sum(log**2 for log in errors), 4), change

    roughly, _ = min(itertools.product(EFFICIENCIES[::STRIDE], costs), key=miss)
    middle = EFFICIENCIES.index(roughly)
    around = EFFICIENCIES[max(0, middle - STRIDE + 1) : middle + STRIDE]
    best = min(itertools.product(around, costs), key=miss)
    return calibration_with(*best)


def efficiency_around(share: float) -> Quantity:
    """Returns a measured efficiency with what it may be off by."""
    return Quantity(share, share * 0.95, min(1.0, share * 1.03))


def _has_two_rates(base: Calibration, runs: Sequence[Run], bandwidth: float | None) -> bool:
    """Returns whether runs were on networks of clearly different bandwidth."""
    rates = [scenario_of(base, run, bandwidth).bandwidth_gbit for run in runs]
    return max(rates) > TWO_RATES * min(rates)
