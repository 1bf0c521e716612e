"""The limits of this process's control groups, versions 1 and 2."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> float:
    """Returns how many cores' time this process may use, by its affinity and its control groups."""
    return min(len(os.sched_getaffinity(0)), cpu_quota())


def cpu_quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Returns how many cores' time the control groups of this process allow.

    Infinite without a limit.
    """
    limits = [float("inf")]
    for group in _control_groups("cpu", root, membership):
        # Version 2. A ValueError: without a limit the quota is "max".
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
            limits.append(int(quota) / int(period))
        # Version 1. Without a limit the quota is negative.
        with contextlib.suppress(OSError):
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8")
            if int(quota) > 0:
                limits.append(int(quota) / int(period))
    return min(limits)


def memory_limit(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Returns the bytes that the control groups of this process allow; infinite without a limit."""
    limits = [float("inf")]
    for group in _control_groups("memory", root, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((group / name).read_text(encoding="utf-8")))
    return min(limits)


def _control_groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Yields the folders of this process's control group and of all groups above it.

    Each of them limits the process. In a container, which may see the process's group as the top,
    some of the folders do not exist.
    """
    if not membership.exists():
        return
    for line in membership.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / controller if controllers else root
            group = top / path.lstrip("/")
            depth = len(group.relative_to(top).parts)
            yield from [group, *group.parents][: depth + 1]
