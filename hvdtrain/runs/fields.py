"""Fields of a run as runs are compared by them."""

import re
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from hvdtrain.formatting import with_noun
from hvdtrain.runs.read import Run
from hvdtrain.world.host import COMPUTING

NETWORK_DIFFERS = 1.5  # times: what is measured of one network varies less
# Which of the variables in world.host.MESSAGES matter where `backend` has this word in it.
_READ_BY = {
    "horovod": ("HOROVOD_",), "mpi": ("OMPI_MCA_", "PRTE_MCA_", "UCX_"), "gloo": ("GLOO_",), "nccl": ("NCCL_",),
    "rpc": ("TP_", "HVDTRAIN_OVER_TCP"), "zmq": ("HVDTRAIN_OVER_TCP",),
}  # fmt: skip


def field_value(run: Run, field: str) -> Any:
    """A field of the run's manifest or summary as it is compared; None where it was not recorded."""
    head, *rest = field.split(".")
    if head == "environment":
        return _variables(run, *rest)
    if field in _COMPARED_BY:
        return _COMPARED_BY[field](run)
    value: Any = getattr(run.manifest if hasattr(run.manifest, head) else run.summary, head)
    for key in rest:
        if value is None:
            break
        value = value.get(key) if isinstance(value, dict) else getattr(value, key)
    return value


def _usable_cores(run: Run) -> list[float] | None:
    usable = [host.cores_usable for host in run.manifest.hosts.values()]
    return sorted(cores for cores in usable if cores is not None) if None not in usable and usable else None


def _gpus(run: Run) -> list[str]:
    """Models are compared, not numbers: one worker may see one GPU of four."""
    return sorted(set(run.manifest.hardware.gpus)) if str(run.manifest.device).startswith("cuda") else []


def placement(run: Run) -> str | None:
    """Which ranks share a host, whatever the hosts' names: `1 server + 1 worker | 1 worker`."""
    servers, hosts = run.kind.servers, [host.ranks for host in run.manifest.hosts.values() if host.ranks]
    counts = [(sum(rank < servers for rank in ranks), sum(rank >= servers for rank in ranks)) for ranks in hosts]
    words = [
        " + ".join(with_noun(count, noun) for count, noun in zip(both, ("server", "worker"), strict=True) if count)
        for both in sorted(counts, reverse=True)
    ]
    return " | ".join(words) or None


def ran_alike(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Whether two kinds of runs were started alike, and on the same one host or on hosts of the same network, over
    which their workers were spread alike.

    Of several hosts one kind may use more, as n workers and a server do beside n workers.
    """
    hosts, other_hosts = _hosts(runs), _hosts(others)
    if (len(hosts) > 1) != (len(other_hosts) > 1) or not (hosts <= other_hosts or other_hosts <= hosts):
        return False
    if len(hosts) > 1 and not (_spread_alike(runs[0], others[0]) and _same_network([*runs, *others])):
        return False
    return len({run.manifest.starter for run in (*runs, *others)}) == 1


def _spread_alike(run: Run, other: Run) -> bool:
    """Whether hosts have as many workers, or as many ranks, in both; true where that was not recorded."""

    def counts(of: Run, first: int) -> list[int]:
        of_hosts = (sum(rank >= first for rank in host.ranks) for host in of.manifest.hosts.values())
        return sorted(filter(None, of_hosts))

    pairs = [(counts(run, run.kind.servers), counts(other, other.kind.servers)), (counts(run, 0), counts(other, 0))]
    return any(not one or not two or one == two for one, two in pairs)


def _same_network(runs: Sequence[Run]) -> bool:
    """Whether all that was measured of the hosts' network is alike, whatever its interface is called."""
    measured = [[link.gbit_s for link in run.manifest.network.pairs if link.gbit_s] for run in runs]
    speeds = [median(links) for links in measured if links]
    return not speeds or max(speeds) <= NETWORK_DIFFERS * min(speeds)


def _hosts(runs: Sequence[Run]) -> set[str]:
    return {name for run in runs for name in run.manifest.hardware.hosts}


def _variables(run: Run, which: str, *name: str) -> Any:
    """`environment.computing`, `environment.messages`: the variables of these that were set; with a name, its value.
    After `servers_`, those of the servers' processes, with each of the values that they had.
    """
    is_of_servers = which.startswith("servers_")
    environment = _of_servers(run) if is_of_servers else run.manifest.environment
    if environment is None:
        return None
    backend = str(run.manifest.backend)
    carried = tuple(prefix for word, prefixes in _READ_BY.items() if word in backend for prefix in prefixes)
    read = COMPUTING if which.endswith("computing") else carried
    values = {variable: value for variable, value in environment.items() if variable.startswith(read)}
    if not is_of_servers:  # which follows from threads_per_worker
        values = {variable: value for variable, value in values.items() if not variable.endswith("_NUM_THREADS")}
    return values.get(name[0], "not set") if name else values


def _of_servers(run: Run) -> dict[str, str] | None:
    environments = run.manifest.server_environment
    names = {name for environment in environments for name in environment}
    values = {name: sorted({environment.get(name, "not set") for environment in environments}) for name in names}
    return {name: " or ".join(different) for name, different in values.items()} if environments else None


# Fields that are compared by something else than what was recorded.
_COMPARED_BY: dict[str, Callable[[Run], Any]] = {
    "hosts.cores_usable": _usable_cores,
    "placement": placement,
    "record": lambda run: run.manifest.record if run.kind.servers else None,  # it is servers that do
    # Without the number of steps, which follows from the batch.
    "schedule.form": lambda run: re.sub(r"over \d+ steps", "to the last step", str(run.manifest.schedule)),
    "hardware.hosts": lambda run: len(run.manifest.hardware.hosts) or None,
    "hardware.gpus": _gpus,
}
