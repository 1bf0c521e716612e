"""Starts lost workers of a job on this machine again: `python -m hvdtrain.rank.respawn RUN`, beside the job's starter.

It has loaded torch while the job's ranks did, and forks: a worker is back within a fraction of a second, and the others
do not share their cores with two seconds of imports. It runs no thread and computes nothing itself, so that forks lack
nothing.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from hvdtrain.errors import Failure, UsageError
from hvdtrain.ps.handover import handover_file
from hvdtrain.ps.lives import LEFT, lives_file
from hvdtrain.rank import preload
from hvdtrain.rank.join import join_run
from hvdtrain.rank.process import set_threads
from hvdtrain.world.parent import die_with_parent

LOOK_EVERY_S = 0.05
MOST_IN_A_ROW = 5  # workers that end before they have joined: then something else is wrong


class Respawner:
    """Forks workers that join the run, one for each that is lost."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.lives = lives_file(run)
        self.read = 0  # bytes of it
        self.joined: set[int] = set()  # processes that have
        self.coming: set[int] = set()  # those that have not ended
        self.replaced: set[int] = set()  # those that ended while they waited to join: the servers may learn it later
        self.in_a_row = 0

    def until_over(self) -> None:
        """Return when the job is over."""
        while not handover_file(self.run).exists():
            time.sleep(LOOK_EVERY_S)
        while self.coming or handover_file(self.run).exists():
            for _ in range(self._lost() + self._unborn()):
                if self.in_a_row < MOST_IN_A_ROW and handover_file(self.run).exists():
                    self.coming.add(self._fork())
            time.sleep(LOOK_EVERY_S)

    def _lost(self) -> int:
        """How many workers have been lost since the last look."""
        with self.lives.open("rb") as file:
            file.seek(self.read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self.read += len(whole)
        lives = [json.loads(line) for line in whole.splitlines()]
        if any(not life["why"] and life["pid"] for life in lives):
            self.joined |= {life["pid"] for life in lives}
            self.in_a_row = 0
        return sum(life["why"] not in ("", LEFT) and life["pid"] not in self.replaced for life in lives)

    def _unborn(self) -> int:
        """How many processes have ended since the last look before they had joined."""
        count = 0
        for pid in list(self.coming):
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.coming.discard(pid)
                if code and pid not in self.joined:
                    count += 1
                    self.replaced.add(pid)
                    self.in_a_row += 1
                    if self.in_a_row == MOST_IN_A_ROW:
                        print(f"hvdtrain: {self.in_a_row} workers in a row could not join: no more are started")
        return count

    def _fork(self) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(signal.SIGTERM)
        code = 1
        try:
            join_run(self.run)
            code = 0
        except (UsageError, Failure) as error:
            print(f"hvdtrain: {error}")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


if __name__ == "__main__":
    set_threads(1, is_server=False)  # until a worker knows better
    preload.load()
    Respawner(Path(sys.argv[1])).until_over()
