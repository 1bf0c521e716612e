"""What the first rank's store does for N ranks that train nothing, threads of this process, in a
network of its own:

    unshare --net python tests/benchmarks/many_ranks.py 64 128 256
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Barrier, Thread

import torch.distributed  # noqa: F401  not in the first figure

from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.meeting import Meeting

Marks = dict[str, tuple[float, float]]  # seconds and MiB by the end of each phase


def loopback_mib() -> float:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.split()[1]) / 2**20


def meet(number: int, size: int, together: Barrier, marks: Marks) -> None:
    """What one rank does, in phases that all begin together."""

    def mark(phase: str) -> None:
        if together.wait() == 0:
            marks[phase] = time.perf_counter(), loopback_mib()
        together.wait()

    mark("begun")
    meeting = Meeting(World("env", number, size, 0, 1), 300.0)
    meeting.wait_until_all_are_ready()
    mark("met")
    names = [f"wire/{rank}" for rank in range(size)]
    meeting.store.set(names[number], "tcp://10.0.0.1:40000")
    meeting.store.wait(names)
    meeting.store.multi_get(names)
    mark("addresses")
    for name in names:
        meeting.store.get(name)
    mark("one by one")


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for size in map(int, sys.argv[1:]):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + size)}
        together, marks = Barrier(size), Marks()
        threads = [
            Thread(target=meet, args=(number, size, together, marks)) for number in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (_, before), *phases = marks.items()
        for phase, after in phases:
            print(
                f"{size:5d} ranks  {phase:10} {after[0] - before[0]:7.2f} s {after[1] - before[1]:8.2f} MiB"
            )
            before = after


if __name__ == "__main__":
    main()
