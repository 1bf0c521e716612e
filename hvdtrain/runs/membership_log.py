"""The membership of a job over time: the lives of its workers, as the first server records them."""

import json
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.base.formatting import with_noun
from hvdtrain.base.system.appending import AppendedFile, whole_lines

LEFT = "left"  # why the life of a worker has ended that was not lost


def membership_file(folder: Path) -> Path:
    return folder / "membership.jsonl"


def who_is_gone(lives: Collection[Any], came_to: Mapping[int, int] = {}) -> str:
    """Returns which workers were lost, have left or came back, in words.

    For example `1 of 2 workers: rank 2 was lost after step 40`. Empty if all workers are there and
    none was lost.

    Args:
        lives: lives of workers, in the order in which they began.
        came_to: the last step of each rank.
    """
    # Why each life of a rank has ended. The last reason is empty while that life goes on.
    reasons: dict[int, list[str]] = {}
    for life in lives:
        reasons.setdefault(life.rank, []).append(life.why)
    phrases = []
    for rank, whys in sorted(reasons.items()):
        was_lost = any(why not in ("", LEFT) for why in whys)
        is_there = whys[-1] == ""
        if is_there and not was_lost:
            continue
        phrase = f"rank {rank} {_what_happened(was_lost, whys[-1])}"
        if not is_there and rank in came_to:
            phrase += f" after step {came_to[rank]}"
        phrases.append(phrase)
    if not phrases:
        return ""
    present = sum(whys[-1] == "" for whys in reasons.values())
    return f"{present} of {with_noun(len(reasons), 'worker')}: {', '.join(phrases)}"


def _what_happened(was_lost: bool, last_reason: str) -> str:
    if last_reason == "":
        return "was lost and came back"
    if last_reason != LEFT:
        return "was lost"
    return "was lost, came back and left" if was_lost else "left"


@dataclass
class Life:
    """One life of a worker.

    Attributes:
        member: a number that no other life has: see coordination.roster.
        rank: the worker's rank. A worker that joins gets that of a lost worker, or a new one.
        incarnation: the number of this life among the lives of the rank, from 1.
        pid: the worker's process on its host, if it joined later; else None.
        joined: when the life began, in seconds since 1970.
        left: when it ended, in seconds since 1970; None while the worker is there.
        why: the reason why it ended; empty while the worker is there.
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
        file: the file that gets a line as soon as a worker joins or is gone.
        servers, workers: how many there are at the start.
        recovered: whether to continue the file of a first server that was killed.
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
        """Records that a worker joins, with the lowest rank that no worker has."""
        with self._lock:
            taken = {life.rank for life in self._lives if not life.why}
            rank = self.servers
            while rank in taken:
                rank += 1
            return self._begin(member, rank, pid)

    def end(self, member: int, why: str) -> Life:
        """Records that a worker is gone, and why, unless that is recorded already."""
        with self._lock:
            life = next(life for life in self._lives if life.member == member)
            if not life.why:
                life.left = round(time.time(), 3)
                life.why = why
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
