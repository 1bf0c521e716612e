"""Checks of this machine's resources: cores, memory, network, folders to write in."""

import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

from hvdtrain.doctor.findings import MISSING, OK, WARNING, Finding
from hvdtrain.system.cgroups import cpu_quota, memory_limit
from hvdtrain.world.network import resolve

# Measured with OpenMPI 5.0.11 on one host: each rank creates a file of 16 MB in /dev/shm, and MPI_Init fails without
# that much space. `hvdtrain compare` with no options, which runs two workers and a server, takes 1.8 GB of memory.
SEGMENT_MB, COMPARE_GB = 16, 1.8


def cores() -> Finding:
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    found = f"{allowed} of {os.cpu_count()} allowed" + (f", time on {quota:g} of them" if quota < allowed else "")
    if quota < allowed:
        return Finding(WARNING, found, "give workers no more threads together than that: --threads")
    if allowed < 2:
        return Finding(WARNING, found, "workers take turns on one core: speeds say nothing about scaling")
    return Finding(OK, found)


def memory() -> Finding:
    import psutil

    host, limit = psutil.virtual_memory(), memory_limit()
    total, free = min(host.total, limit) / 1e9, min(host.available, limit) / 1e9
    found = f"{total:.1f} GB, {free:.1f} GB available"
    if free < COMPARE_GB:
        return Finding(WARNING, found, f"the smallest comparison takes {COMPARE_GB} GB: end other programs")
    return Finding(OK, found)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Where MPI's and TensorPipe's shared memory lives."""
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
    """Whether large messages may use huge pages: without them, page faults take more than half of their speed."""
    setting = re.search(r"\[(\w+)\]", file.read_text()) if file.exists() else None
    if setting is None or setting[1] == "never":
        effect = "messages of a parameter server with a large model are slow"
        return Finding(WARNING, setting[1] if setting else "none here", f"{effect}: as root `echo madvise > {file}`")
    return Finding(OK, setting[1])


def host_name() -> Finding:
    """Whether this host's name resolves to an address by which other hosts' ranks can reach it."""
    name = socket.gethostname()
    address = resolve(name)
    if not address:
        return Finding(WARNING, f"{name} does not resolve", "jobs on several hosts need it: add it to /etc/hosts")
    if address.startswith("127."):
        advice = "enough for one machine; on several hosts it must mean an address that the others reach"
        return Finding(WARNING, f"{name} is {address}", advice)
    return Finding(OK, f"{name} is {address}")


def cache() -> Finding:
    """Whether data sets can be built in the user's cache; the check leaves nothing there."""
    from hvdtrain.data.storage import cache_root

    folder = cache_root()
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding(
            MISSING, f"{folder} cannot be written: {error.strerror}", "name another folder: HVDTRAIN_CACHE=FOLDER"
        )
    return Finding(OK, f"{folder}, {shutil.disk_usage(existing).free / 1e9:,.0f} GB free")
