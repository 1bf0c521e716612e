"""What this process may use of its host: the limits of its control groups, versions 1 and 2."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> float:
    """Cores' worth of time that this process may use: those it is allowed on, within its control groups' quota."""
    return min(len(os.sched_getaffinity(0)), cpu_quota())


def cpu_quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Cores' worth of time that this process's control groups (version 1 or 2) allow; infinite without a limit."""
    limits = [float("inf")]
    for group in _control_groups("cpu", root, membership):
        with contextlib.suppress(OSError, ValueError):  # no such file in this version; "max" is no number
            quota, period = (group / "cpu.max").read_text().split()
            limits.append(int(quota) / int(period))
        with contextlib.suppress(OSError):
            quota, period = ((group / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
            limits += [int(quota) / int(period)] if int(quota) > 0 else []
    return min(limits)


def memory_limit(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Bytes that this process's control groups (version 1 or 2) allow; infinite without a limit."""
    limits = [float("inf")]
    for group in _control_groups("memory", root, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return min(limits)


def _control_groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The folders of this process's control group and of all above it: each of them limits it."""
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / controller if controllers else root
            group = top / path.lstrip("/")  # a container may see its own group as the top: absent folders are no harm
            yield from [group, *group.parents][: len(group.relative_to(top).parts) + 1]
