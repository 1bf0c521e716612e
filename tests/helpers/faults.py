"""Faults of a running job, drawn from a seed: which, of whom, when, for how long; and how each is
done and undone.
"""

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdtrain.base.errors import UsageError
from hvdtrain.runs.join_info import read_restart_info

STARTERS = {"launch": ("launch",), "starter": ("mpirun", "prterun", "horovodrun")}
AT_START = (
    0.25  # the share of faults that may come before the job has taken a step since it was started
)
NURSERY = "hvdtrain.job.rank.respawn"
BLOCK = bytes(2**16)


@dataclass(frozen=True)
class Fault:
    """What goes wrong at a moment.

    Attributes:
        at: seconds after the soak began.
        kind: `kill`, `stop`, `full` (disk) or `cut` (link).
        target: `rank 0`, `starter`, `launch`; empty where it is nobody's.
        seconds: how long it lasts; 0 for ever.
        at_start: it may come while the job starts.
    """

    at: float
    kind: str
    target: str = ""
    seconds: float = 0.0
    at_start: bool = False

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at:6.1f} s  {self.kind} {self.target}{lasts}".replace("  for", " for")


def plan(seed: int, seconds: float, counts: dict[str, int], ranks: int) -> list[Fault]:
    """So many faults of each kind, in the order in which they come. The same arguments make the
    same plan.

    Those of one kind are spread over the time, each at a random moment of its part of it, so that
    the job gets somewhere between them.
    """
    faults = []
    targets = [*(f"rank {rank}" for rank in range(ranks)), "starter", "launch"]
    for kind, count in counts.items():
        rng = random.Random(f"{seed} {kind}")
        for number in range(count):
            at = seconds * (number + rng.uniform(0.15, 0.95)) / count
            target = rng.choice(targets) if kind in ("kill", "stop") else ""
            lasts = 0.0 if kind == "kill" else round(rng.uniform(1, 5), 1)
            faults.append(Fault(round(at, 1), kind, target, lasts, rng.random() < AT_START))
    return sorted(faults, key=lambda fault: fault.at)


def processes_of(run: Path) -> list[psutil.Process]:
    """The processes of the job in that run folder: launch, its starter, ranks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if (
                process.pid != os.getpid()
                and str(run) in words
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


def target_of(run: Path, name: str) -> psutil.Process | None:
    """The process that is meant; None while it is not there.

    A rank that came back is a fork of the respawner. Which of them a server is it says itself; of
    workers any will do.
    """
    with contextlib.suppress(psutil.Error, UsageError):
        if name.startswith("rank") and (server := read_restart_info(run, int(name.split()[1]))):
            return psutil.Process(server.pid)
    for process in processes_of(run):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if name in STARTERS:
                is_it = Path(words[0]).name in STARTERS[name] or (
                    name == "launch" and "launch" in words[:5]
                )
            else:
                is_it = (
                    "train" in words[:5]
                    and process.environ().get("OMPI_COMM_WORLD_RANK") == name.split()[1]
                )
            if is_it:
                return process
    return (
        next((process for process in processes_of(run) if _is_fork(process)), None)
        if "rank" in name
        else None
    )


def _is_fork(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return NURSERY in process.cmdline() and parent is not None and NURSERY in parent.cmdline()
    return False


def begin(fault: Fault, run: Path) -> Callable[[], None] | None:
    """Do it; returns what undoes it, or None where its target is not there now."""
    if fault.kind == "full":
        return _fill(run.parent / "ballast")
    if fault.kind == "cut":  # a starter has ended with the last rank that it had started
        network_of = target_of(run, "starter") or next(filter(_is_fork, processes_of(run)), None)
        return _cut_loopback(network_of.pid) if network_of else None
    process = target_of(run, fault.target)
    if process is None:
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        return _continue(process) if fault.kind == "stop" else lambda: None
    return None


def _continue(process: psutil.Process) -> Callable[[], None]:
    def undo() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)

    return undo


def _fill(ballast: Path) -> Callable[[], None]:
    """Take all that is free of the file system."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(BLOCK):
            pass
    return lambda: ballast.unlink(missing_ok=True)


def _cut_loopback(pid: int) -> Callable[[], None]:
    """Cut loopback in the network that this process is in."""
    entered = ["nsenter", "--target", str(pid), "--net"]
    bucket = ["tbf", "rate", "8bit", "burst", "1", "latency", "50ms"]
    # it is undone there, even if the process is gone by then
    held = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    _run([*entered, "tc", "qdisc", "replace", "dev", "lo", "root", *bucket])

    def undo() -> None:
        _run(
            ["nsenter", f"--net=/proc/self/fd/{held}", "tc", "qdisc", "del", "dev", "lo", "root"],
            (held,),
        )
        os.close(held)

    return undo


def _run(words: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
    subprocess.run(
        words, check=False, pass_fds=pass_fds, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
