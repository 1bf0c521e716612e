"""Fields of a run as runs are compared by them."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from hvdtrain.formatting import with_noun
from hvdtrain.runs.read import Run
from hvdtrain.world.host import COMPUTING

NETWORK_DIFFERS = 1.5  # times: what is measured of one network varies less


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
    return sorted(cores for cores in usable if cores is not None) if usable and None not in usable else None


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
    hosts, other_hosts = ({name for run in kind for name in run.manifest.hardware.hosts} for kind in (runs, others))
    if (len(hosts) > 1) != (len(other_hosts) > 1) or not (hosts <= other_hosts or other_hosts <= hosts):
        return False
    if len(hosts) > 1 and not (_spread_alike(runs[0], others[0]) and _same_network([*runs, *others])):
        return False
    return len({run.manifest.starter for run in (*runs, *others)}) == 1


def _spread_alike(run: Run, other: Run) -> bool:
    """Whether hosts have as many workers, or as many ranks, in both; true where that was not recorded."""
    for firsts in ((run.kind.servers, other.kind.servers), (0, 0)):
        one, two = (
            sorted(filter(None, (sum(rank >= first for rank in host.ranks) for host in of.manifest.hosts.values())))
            for of, first in zip((run, other), firsts, strict=True)
        )
        if not one or not two or one == two:
            return True
    return False


def _same_network(runs: Sequence[Run]) -> bool:
    """Whether all that was measured of the hosts' network is alike, whatever its interface is called."""
    measured = [[link.gbit_s for link in run.manifest.network.pairs if link.gbit_s] for run in runs]
    speeds = [median(links) for links in measured if links]
    return not speeds or max(speeds) <= NETWORK_DIFFERS * min(speeds)


def _variables(run: Run, which: str, *name: str) -> Any:
    """The variables that were set: `environment.computing` by which workers compute, `environment.messages` all of
    theirs, `environment.servers` those of the servers, each with all values that it has; with a name, its value.
    """
    environments = run.manifest.server_environment if which == "servers" else [run.manifest.environment]
    if not environments:
        return None
    names = {
        variable
        for environment in environments
        for variable in environment
        if which == "servers"
        or (not variable.endswith("_NUM_THREADS")  # which follows from threads_per_worker
            and (which != "computing" or variable.startswith(COMPUTING)))
    }  # fmt: skip
    values = {
        variable: " or ".join(sorted({environment.get(variable, "not set") for environment in environments}))
        for variable in names
    }
    return values.get(name[0], "not set") if name else values


# Fields that are compared by something else than what was recorded.
_COMPARED_BY: dict[str, Callable[[Run], Any]] = {
    "hosts.cores_usable": _usable_cores,
    "placement": placement,
    "record": lambda run: run.manifest.record if run.kind.servers else None,  # it is servers that do
    "hardware.hosts": lambda run: len(run.manifest.hardware.hosts) or None,
    # Models are compared, not numbers: one worker may see one GPU of four.
    "hardware.gpus": lambda run: sorted(set(run.manifest.hardware.gpus) if run.manifest.device == "cuda" else ()),
}
