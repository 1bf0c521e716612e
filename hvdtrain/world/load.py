"""What else this host did while a job ran on it, and in what state its processor was: noted beside every run."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.world.host import boot_id

FOREIGN_SHARE = 0.05  # of a host's cores: with more, a run was not alone there
STOLEN_SHARE = 0.02  # of its time that another guest of the same machine took
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class HostLoad:
    """Begun before training; all processes of the host count, of other containers too, as far as Linux tells."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ticks = _read_ticks()

    def since(self) -> dict[str, Any]:
        """Since then: seconds that processors were busy and that a hypervisor stole, over all cores."""
        busy, stolen = (now - then for now, then in zip(_read_ticks(), self._ticks, strict=True))
        return {
            "machine": boot_id(), "cores": os.cpu_count(), "seconds": time.perf_counter() - self._began,
            "busy_s": busy / _TICKS_PER_S, "stolen_s": stolen / _TICKS_PER_S,
        }  # fmt: skip


def _read_ticks() -> tuple[int, int]:
    """Clock ticks that all cores together were busy, and stolen from them; 0 where the kernel does not say."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _idle, _iowait, irq, soft_irq, steal = fields
    except (OSError, ValueError):
        return 0, 0
    return user + nice + system + irq + soft_irq, steal


def by_host(loads: Mapping[str, Mapping[str, Any]], spent: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """What summary.json has of each host.

    `others_cores` is how many cores were busy with other than the job's own processes, `stolen_share` the share of all
    cores' time that a hypervisor took.

    Args:
        loads: by host, what HostLoad.since found there.
        spent: by host, processor seconds of the job's own processes in the same time. Hosts of one machine, as
            containers are, count together.
    """
    found = {}
    for name, load in loads.items():
        same = [other for other in loads if load["machine"] and loads[other]["machine"] == load["machine"]] or [name]
        own, seconds = sum(spent.get(other, 0.0) for other in same), max(load["seconds"], 1e-9)
        found[name] = {
            "cores": load["cores"],
            "others_cores": round(max(0.0, load["busy_s"] - own) / seconds, 3),
            "stolen_share": round(load["stolen_s"] / seconds / max(1, load["cores"]), 4),
        }
    return found


def beside_others(hosts: Mapping[str, Any]) -> list[str]:
    """What of `by_host` says that a run was not alone, a phrase for each host."""
    found = []
    for name, load in hosts.items():
        others, cores, stolen = (_number(load, key) for key in ("others_cores", "cores", "stolen_share"))
        phrases = [f"{others:.1f} of {cores:.0f} cores busy otherwise"] if others > FOREIGN_SHARE * cores > 0 else []
        phrases += [f"{stolen:.0%} of its time taken by other guests"] if stolen > STOLEN_SHARE else []
        found += [f"{name} had {' and '.join(phrases)}"] if phrases else []
    return found


def _number(load: Any, key: str) -> float:
    value = load.get(key) if isinstance(load, Mapping) else getattr(load, key, None)
    return float(value) if isinstance(value, (int, float)) else 0.0


def spent_by_host(rows: Sequence[Mapping[str, Any]], seconds: Sequence[float]) -> dict[str, float]:
    """Processor seconds of each host's processes: `host` of each row, and its seconds."""
    spent: dict[str, float] = {}
    for row, own in zip(rows, seconds, strict=True):
        spent[row["host"]] = spent.get(row["host"], 0.0) + own
    return spent
