"""Fields of a run by which runs are compared."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from hvdtrain.base.config.run_config import WARM_UP
from hvdtrain.base.formatting import with_noun
from hvdtrain.base.world.host import COMPUTING
from hvdtrain.runs.read import Run

# Measurements of one network vary by a smaller factor than this.
NETWORK_DIFFERS = 1.5


def field_value(run: Run, field: str) -> Any:
    """Returns a field of the run's manifest or summary in the form in which runs are compared.

    Args:
        field: a name with dots, such as `hardware.cpu` or `environment.computing.OMP_PLACES`.

    Returns:
        The value, or None if the run did not record it.
    """
    if field in _COMPARED_BY:
        return _COMPARED_BY[field](run)
    head, *keys = field.split(".")
    if head == "environment":
        return _variables(run, *keys)
    source = run.manifest if hasattr(run.manifest, head) else run.summary
    value: Any = getattr(source, head)
    for key in keys:
        if value is None:
            return None
        value = value.get(key) if isinstance(value, dict) else getattr(value, key)
    return value


def _usable_cores(run: Run) -> list[float] | None:
    """Returns the sorted numbers of usable cores of all hosts; None unless all were recorded."""
    hosts = run.manifest.hosts.values()
    recorded = [host.cores_usable for host in hosts if host.cores_usable is not None]
    if not hosts or len(recorded) < len(hosts):
        return None
    return sorted(recorded)


def core_sharing(run: Run) -> float:
    """Returns by which factor the hosts of a run claim more cores than their machines have.

    It is 1.0 for hosts that are machines, and 2.0 for two network namespaces of one machine that
    may each use all of its cores.
    """
    claimed: dict[str, float] = {}
    available: dict[str, float] = {}
    for name, host in run.manifest.hosts.items():
        machine = host.machine or name
        cores = float(host.cores or 0)
        claimed[machine] = claimed.get(machine, 0.0) + (host.available_cores or 0.0)
        available[machine] = max(available.get(machine, 0.0), cores)
    factors = [claimed[machine] / cores for machine, cores in available.items() if cores]
    return max([1.0, *factors])


def placement(run: Run) -> str | None:
    """Returns which ranks share a host, without the hosts' names.

    For example `1 server + 1 worker | 1 worker`. None if no host's ranks were recorded.
    """
    counts = []
    for host in run.manifest.hosts.values():
        if host.ranks:
            servers = sum(rank < run.kind.servers for rank in host.ranks)
            counts.append((servers, len(host.ranks) - servers))
    counts.sort(reverse=True)
    return " | ".join(_roles(servers, workers) for servers, workers in counts) or None


def _roles(servers: int, workers: int) -> str:
    roles = []
    if servers:
        roles.append(with_noun(servers, "server"))
    if workers:
        roles.append(with_noun(workers, "worker"))
    return " + ".join(roles)


def ran_alike(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Returns whether two kinds of runs had the same starter and comparable hosts.

    Both ran on the same single host, or both on several hosts of one network, over which their
    workers were spread alike. Of several hosts one kind may use more, as n workers and a server do
    beside n workers.
    """
    hosts = _host_names(runs)
    other_hosts = _host_names(others)
    if (len(hosts) > 1) != (len(other_hosts) > 1):
        return False
    if not (hosts <= other_hosts or other_hosts <= hosts):
        return False
    all_runs = [*runs, *others]
    if len(hosts) > 1:
        if not _spread_alike(runs[0], others[0]):
            return False
        if not _same_network(all_runs):
            return False
    starters = {run.manifest.starter for run in all_runs}
    return len(starters) == 1


def _host_names(runs: Sequence[Run]) -> set[str]:
    names: set[str] = set()
    for run in runs:
        names.update(run.manifest.hardware.hosts)
    return names


def _spread_alike(run: Run, other: Run) -> bool:
    """Returns whether the hosts of both runs have equally many workers, or equally many ranks.

    True if a run did not record which ranks its hosts had.
    """
    workers = _ranks_per_host(run, first=run.kind.servers)
    other_workers = _ranks_per_host(other, first=other.kind.servers)
    if not workers or not other_workers or workers == other_workers:
        return True
    return _ranks_per_host(run) == _ranks_per_host(other)


def _ranks_per_host(run: Run, first: int = 0) -> list[int]:
    """Returns the sorted counts of ranks from `first` on of all hosts that have any."""
    hosts = run.manifest.hosts.values()
    counts = [sum(rank >= first for rank in host.ranks) for host in hosts]
    return sorted(count for count in counts if count)


def _same_network(runs: Sequence[Run]) -> bool:
    """Returns whether the measured throughputs of the runs' networks are alike.

    The names of network interfaces do not count.
    """
    medians = []
    for run in runs:
        links = [link.gbit_s for link in run.manifest.network.pairs if link.gbit_s]
        if links:
            medians.append(median(links))
    return not medians or max(medians) <= NETWORK_DIFFERS * min(medians)


def _variables(run: Run, group: str, *name: str) -> Any:
    """Returns the environment variables of a group by name, or the value of one of them.

    Args:
        group: `computing` for the variables that decide how workers compute, `messages` for all of
            workers' variables, `servers` for servers' variables.
        name: the variable to return. Left out, all of the group are returned.

    Returns:
        Values in words: `1 or 2` where processes differ, `not set` where a process has none. None
        if the group was not recorded.
    """
    if group == "servers":
        environments = run.manifest.server_environment
    else:
        environments = [run.manifest.environment]
    if not environments:
        return None
    names: set[str] = set()
    for environment in environments:
        names.update(variable for variable in environment if _is_in_group(variable, group))
    values = {}
    for variable in names:
        set_to = {environment.get(variable, "not set") for environment in environments}
        values[variable] = " or ".join(sorted(set_to))
    return values.get(name[0], "not set") if name else values


def _is_in_group(variable: str, group: str) -> bool:
    if group == "servers":
        return True
    if variable.endswith("_NUM_THREADS"):  # threads_per_worker tells the same
        return False
    return group != "computing" or variable.startswith(COMPUTING)


def _record(run: Run) -> bool | None:
    """Returns whether servers recorded their updates; None for a run without servers."""
    return run.manifest.record if run.kind.servers else None


def _learning_rate(run: Run) -> float | str | None:
    """Returns the learning rate, or how it was looked for.

    Rates that were found in as many trainings around the same one may differ.
    """
    manifest = run.manifest
    if not manifest.lr_around:
        return manifest.lr
    return f"found around {manifest.lr_around:g} in {manifest.lr_trainings} trainings"


def _schedule(run: Run) -> str | None:
    """Returns the schedule, without the warm-up where that was looked for."""
    manifest = run.manifest
    if not manifest.lr_around or manifest.schedule is None:
        return manifest.schedule
    return manifest.schedule.split(WARM_UP)[0]


def _host_count(run: Run) -> int | None:
    return len(run.manifest.hardware.hosts) or None


def _gpu_models(run: Run) -> list[str]:
    """Returns the models of the GPUs that were computed on.

    Their number is left out, since one worker may see one GPU of four.
    """
    if run.manifest.device != "cuda":
        return []
    return sorted(set(run.manifest.hardware.gpus))


# Fields that are not compared as they were recorded.
_COMPARED_BY: dict[str, Callable[[Run], Any]] = {
    "hosts.cores_usable": _usable_cores,
    "placement": placement,
    "record": _record,
    "lr": _learning_rate,
    "schedule": _schedule,
    "hardware.hosts": _host_count,
    "hardware.gpus": _gpu_models,
}
