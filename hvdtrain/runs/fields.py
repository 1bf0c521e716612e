"""Fields of a run as runs are compared by them."""

import re
from typing import Any

from hvdtrain.formatting import with_noun
from hvdtrain.runs.read import Run
from hvdtrain.world.host import COMPUTING

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
    if field == "hosts.cores_usable":
        usable = [host.cores_usable for host in run.manifest.hosts.values()]
        return None if None in usable else sorted(map(_without_zeros, usable)) or None
    if head == "placement":
        return placement(run)
    if head == "slow":
        return run.manifest.slow.asked
    if head == "record" and not run.kind.servers:  # it is servers that do
        return None
    value: Any = getattr(run.manifest if hasattr(run.manifest, head) else run.summary, head)
    if field == "schedule.form":  # without the number of steps, which follows from the batch
        return re.sub(r"over \d+ steps", "to the last step", str(value))
    for key in rest:
        if value is None:
            break
        value = value.get(key) if isinstance(value, dict) else getattr(value, key)
    if field == "hardware.hosts":
        return len(value) or None
    if field == "hardware.gpus":  # models are compared, not numbers: one worker may see one GPU of four
        return sorted(set(value)) if str(run.manifest.device).startswith("cuda") else []
    return _without_zeros(value) if field == "hardware.cores_usable" else value


def placement(run: Run) -> str | None:
    """Which ranks share a host, whatever the hosts' names: `1 server + 1 worker | 1 worker`."""
    servers, hosts = run.kind.servers, [host.ranks for host in run.manifest.hosts.values() if host.ranks]
    counts = [(sum(rank < servers for rank in own), sum(rank >= servers for rank in own)) for own in hosts]
    words = [
        " + ".join(with_noun(count, noun) for count, noun in zip(both, ("server", "worker"), strict=True) if count)
        for both in sorted(counts, reverse=True)
    ]
    return " | ".join(words) or None


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
    own = {variable: value for variable, value in environment.items() if variable.startswith(read)}
    return own.get(name[0], "not set") if name else own


def _of_servers(run: Run) -> dict[str, str] | None:
    environments = run.manifest.server_environment
    names = {name for own in environments for name in own}
    values = {name: sorted({own.get(name, "not set") for own in environments}) for name in names}
    return {name: " or ".join(found) for name, found in values.items()} if environments else None


def _without_zeros(cores: float | None) -> float | None:
    return int(cores) if cores is not None and cores == int(cores) else cores
