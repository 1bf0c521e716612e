"""Other load of a host while a job ran there, which every run records."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.base.world.host import boot_id

# A run was not alone on a host if other processes kept a larger share of its cores busy.
FOREIGN_SHARE = 0.05
# A run was not alone either if a hypervisor gave a larger share of its time to other guests.
STOLEN_SHARE = 0.02
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class HostLoad:
    """Measures the load of this host from now on.

    All processes of the host count, also in other containers, as far as Linux tells.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ticks = _read_ticks()

    def since(self) -> dict[str, Any]:
        """Returns the seconds that cores were busy, and that a hypervisor stole, over all cores."""
        busy_before, stolen_before = self._ticks
        busy, stolen = _read_ticks()
        return {
            "machine": boot_id(),
            "cores": os.cpu_count(),
            "seconds": time.perf_counter() - self._began,
            "busy_s": (busy - busy_before) / _TICKS_PER_S,
            "stolen_s": (stolen - stolen_before) / _TICKS_PER_S,
        }


def _read_ticks() -> tuple[int, int]:
    """Returns the clock ticks that all cores were busy, and that were stolen from them.

    Both are 0 if the kernel does not say.
    """
    try:
        all_cores, _ = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)
        fields = [int(word) for word in all_cores.split()[1:9]]
        user, nice, system, _idle, _iowait, irq, soft_irq, steal = fields
    except (OSError, ValueError):
        return 0, 0
    return user + nice + system + irq + soft_irq, steal


def by_host(
    loads: Mapping[str, Mapping[str, Any]], spent: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Returns the load of each host as summary.json has it.

    `others_cores` is how many cores were busy with processes of others, `stolen_share` the share of
    all cores' time that a hypervisor took.

    Args:
        loads: the result of HostLoad.since of each host.
        spent: processor seconds of the job's processes on each host in the same time. Hosts of one
            machine, such as containers, count together.
    """
    summary = {}
    for name, load in loads.items():
        same_machine = [name]
        if load["machine"]:
            same_machine = [other for other in loads if loads[other]["machine"] == load["machine"]]
        own_s = sum(spent.get(other, 0.0) for other in same_machine)
        seconds = max(load["seconds"], 1e-9)
        summary[name] = {
            "cores": load["cores"],
            "others_cores": round(max(0.0, load["busy_s"] - own_s) / seconds, 3),
            "stolen_share": round(load["stolen_s"] / seconds / max(1, load["cores"]), 4),
        }
    return summary


def beside_others(hosts: Mapping[str, Any]) -> list[str]:
    """Returns a phrase for each host of `by_host` on which a run was not alone."""
    found = []
    for name, load in hosts.items():
        cores = _number(load, "cores")
        others = _number(load, "others_cores")
        stolen = _number(load, "stolen_share")
        phrases = []
        if others > FOREIGN_SHARE * cores > 0:
            phrases.append(f"{others:.1f} of {cores:.0f} cores busy otherwise")
        if stolen > STOLEN_SHARE:
            phrases.append(f"{stolen:.0%} of its time taken by other guests")
        if phrases:
            found.append(f"{name} had {' and '.join(phrases)}")
    return found


def others_share(load: Any) -> float:
    """Returns the share of a host's cores that other processes and other guests had.

    Args:
        load: of one host of `by_host`. What Linux did not say counts as 0.
    """
    cores = _number(load, "cores")
    busy = _number(load, "others_cores") / cores if cores else 0.0
    return busy + _number(load, "stolen_share")


def _number(load: Any, key: str) -> float:
    value = load.get(key) if isinstance(load, Mapping) else getattr(load, key, None)
    return float(value) if isinstance(value, (int, float)) else 0.0


def spent_by_host(rows: Sequence[Mapping[str, Any]], seconds: Sequence[float]) -> dict[str, float]:
    """Returns the processor seconds of each host's processes.

    Args:
        rows: each process, with its `host`.
        seconds: each process's processor seconds.
    """
    spent: dict[str, float] = {}
    for row, own_s in zip(rows, seconds, strict=True):
        spent[row["host"]] = spent.get(row["host"], 0.0) + own_s
    return spent
