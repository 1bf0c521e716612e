"""Checks of this machine's resources: cores, memory, network, folders to write in."""

import os
import re
import shutil
import socket
from pathlib import Path

from hvdtrain.base.config.writing import check_folder
from hvdtrain.base.system.cgroups import cpu_quota, memory_limit
from hvdtrain.base.world.network import resolve
from hvdtrain.tools.doctor.findings import MISSING, OK, WARNING, Finding

# The size of the file that each rank of OpenMPI 5.0.11 creates in /dev/shm. MPI_Init fails if there
# is less space.
SEGMENT_MB = 16
# The memory of `hvdtrain compare` without options, which runs two workers and a server.
COMPARE_GB = 1.8


def cores() -> Finding:
    """Checks how many cores this process may use."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    found = f"{allowed} of {os.cpu_count()} allowed"
    if quota < allowed:
        found = f"{found}, time on {quota:g} of them"
        return Finding(WARNING, found, "give workers no more threads together than that: --threads")
    if allowed < 2:
        return Finding(
            WARNING, found, "workers take turns on one core: speeds say nothing about scaling"
        )
    return Finding(OK, found)


def memory() -> Finding:
    """Checks whether there is enough memory for the smallest comparison."""
    import psutil

    host = psutil.virtual_memory()
    limit = memory_limit()
    total = min(host.total, limit) / 1e9
    free = min(host.available, limit) / 1e9
    found = f"{total:.1f} GB, {free:.1f} GB available"
    if free < COMPARE_GB:
        return Finding(
            WARNING, found, f"the smallest comparison takes {COMPARE_GB} GB: end other programs"
        )
    return Finding(OK, found)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Checks the folder of MPI's and TensorPipe's shared memory."""
    if not folder.is_dir():
        advice = f"mount it: `mount -t tmpfs -o size=1g tmpfs {folder}`"
        return Finding(WARNING, f"no {folder}: MPI falls back on the temporary folder", advice)
    space = shutil.disk_usage(folder)
    found = f"{space.total / 2**20:,.0f} MB, {space.free / 2**20:,.0f} MB free"
    remedy = f"`docker run --shm-size=1g`, or `mount -o remount,size=1g {folder}`"
    if space.free < SEGMENT_MB * 2**20:
        return Finding(MISSING, found, f"MPI cannot start with less than {SEGMENT_MB} MB: {remedy}")
    return Finding(OK, found)


def huge_pages(file: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Finding:
    """Checks whether large messages may use huge pages, without which page faults slow them."""
    setting = re.search(r"\[(\w+)\]", file.read_text(encoding="utf-8")) if file.exists() else None
    if setting is None or setting[1] == "never":
        found = setting[1] if setting else "none here"
        effect = "messages of a parameter server with a large model are slow"
        return Finding(WARNING, found, f"{effect}: as root `echo madvise > {file}`")
    return Finding(OK, setting[1])


def host_name() -> Finding:
    """Checks whether this host's name resolves to an address that other hosts can reach."""
    name = socket.gethostname()
    address = resolve(name)
    if not address:
        advice = "jobs on several hosts need it: add it to /etc/hosts"
        return Finding(WARNING, f"{name} does not resolve", advice)
    if address.startswith("127."):
        advice = (
            "enough for one machine, and for several hosts that have one network each; with several "
            "networks set HVDTRAIN_INTERFACE, or let the name mean an address that the others reach"
        )
        return Finding(WARNING, f"{name} is {address}", advice)
    return Finding(OK, f"{name} is {address}")


def cache() -> Finding:
    """Checks whether data sets can be built in the user's cache. Leaves nothing there."""
    from hvdtrain.data.storage import cache_root

    folder = cache_root()
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        check_folder(existing)
    except OSError as error:
        found = f"{folder} cannot be written: {error.strerror}"
        return Finding(MISSING, found, "name another folder: HVDTRAIN_CACHE=FOLDER")
    return Finding(OK, f"{folder}, {shutil.disk_usage(existing).free / 1e9:,.0f} GB free")
