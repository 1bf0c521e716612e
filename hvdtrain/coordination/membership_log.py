"""Who was there, and when: the lives of workers, as the first server writes them down."""

import json
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.formatting import with_noun
from hvdtrain.system.appending import AppendedFile, whole_lines

LEFT = "left"  # why a life has ended that was not lost


def membership_file(folder: Path) -> Path:
    return folder / "membership.jsonl"


def who_is_lost(lives: Collection[Any], came_to: Mapping[int, int] | None = None) -> str:
    """`1 of 2 workers: rank 2 was lost after step 40`, where it came to that; empty where none of these lives was."""
    ranks, present = {life.rank for life in lives}, {life.rank for life in lives if not life.why}
    lost = sorted({life.rank for life in lives if life.why not in ("", LEFT)})
    then = {rank: f" after step {step}" for rank, step in (came_to or {}).items()}
    then |= dict.fromkeys(present, " and came back")
    each = ", ".join(f"rank {rank} was lost{then.get(rank, '')}" for rank in lost)
    return f"{len(present)} of {with_noun(len(ranks), 'worker')}: {each}" if lost else ""


@dataclass
class Life:
    """One life of a worker.

    Attributes:
        member: its number, which no other life has: see coordination.roster.
        rank: its place in the job: that of a worker that was lost, or a new one beside the others.
        incarnation: which life at that place it is, from 1.
        pid: of one that has joined, its process on its host.
        joined, left: in seconds since 1970; left is None of one that is still there.
        why: what ended it; empty while it goes on.
    """

    member: int
    rank: int
    incarnation: int
    pid: int | None
    joined: float
    left: float | None = None
    why: str = ""


class MembershipLog:
    """The lives of all workers of a job.

    Args:
        file: gets a line when a worker joins or is gone, at once.
        servers, workers: how many there are at the start.
        recovered: go on with what the file has, in place of a first server that was killed.
    """

    def __init__(self, file: Path, servers: int, workers: int, recovered: bool = False) -> None:
        self.servers = servers
        self._lives: list[Life] = []
        self._lock = threading.Lock()
        if recovered:
            rows = {row["member"]: Life(**row) for row in map(json.loads, whole_lines(file))}
            self._lives = [rows[member] for member in sorted(rows)]
        self._file = AppendedFile(file, anew=not recovered)
        for member in range(0 if recovered else workers):
            self._begin(member, servers + member, None)

    def begin(self, member: int, pid: int) -> Life:
        """A worker joins: in the place of one that is gone, the lowest, or in a new one."""
        with self._lock:
            taken = {life.rank for life in self._lives if not life.why}
            rank = self.servers
            while rank in taken:
                rank += 1
            return self._begin(member, rank, pid)

    def end(self, member: int, why: str) -> Life:
        """A worker is gone, for this reason."""
        with self._lock:
            life = next(life for life in self._lives if life.member == member)
            if not life.why:
                life.left, life.why = round(time.time(), 3), why
                self._write(life)
            return life

    def all(self) -> list[Life]:
        with self._lock:
            return list(self._lives)

    def close(self) -> None:
        self._file.close()

    def _begin(self, member: int, rank: int, pid: int | None) -> Life:
        incarnation = 1 + sum(life.rank == rank for life in self._lives)
        life = Life(member, rank, incarnation, pid, round(time.time(), 3))
        self._lives.append(life)
        self._write(life)
        return life

    def _write(self, life: Life) -> None:
        self._file.write(json.dumps(asdict(life)) + "\n")
