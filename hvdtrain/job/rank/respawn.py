"""A process that starts lost ranks of a job on this machine again.

It runs as `python -Pm hvdtrain.job.rank.respawn RUN`, beside the job's starter.

The process loads torch while the job's ranks do, and forks: a worker is back within a fraction of a
second, and the others do not share their cores with two seconds of imports. The process runs no
threads and computes nothing, so that forks lack nothing. It holds open the memory that has each
server's state (see ps.crash_memory). The server that it forks in place of a killed one goes on with
that state.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.system.parent import die_with_parent, end_with
from hvdtrain.job.rank.comeback import come_back
from hvdtrain.job.rank.join import join_run
from hvdtrain.job.rank.preloading import JOINING, preload
from hvdtrain.launch.private_network import network_of
from hvdtrain.runs.join_info import (
    MEMORY_NAME,
    JoinInfo,
    join_file,
    read_join_info,
    read_restart_info,
    restart_file,
)
from hvdtrain.runs.membership_log import LEFT, membership_file

LOOK_EVERY_S = 0.05
# After so many failures in a row, nobody is started again: something else is wrong. A worker has
# failed if it ends before it has joined, or less than SOON_S after. A server has failed if it ends
# less than SOON_S after its start.
MOST_IN_A_ROW = 5
SOON_S = 5.0
# The pause before a server's second try. Before each later try the pause grows by twice as much: a
# disk may be full.
PAUSE_S = 0.25


class Respawner:
    """Forks a worker that joins the run for each lost worker, and a server for each killed one.

    Servers that are killed come back only if JoinInfo.servers_return.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lives_file = membership_file(run)
        self._lives_read = 0  # bytes of the file
        # By process, when a worker was seen to have joined, by time.monotonic.
        self._joined: dict[int, float] = {}
        self._coming: set[int] = set()  # forked workers that have not ended
        # Workers that ended while they waited to join, and that another one replaces. The servers
        # may learn later that they are lost.
        self._replaced: set[int] = set()
        self._failed_in_a_row = 0
        self._workers_due = 0
        self._servers: dict[int, _Server] = {}  # by rank
        self._network: dict[str, int] = {}
        self._job: JoinInfo | None = None

    def until_over(self) -> None:
        """Starts lost ranks again until the job is over."""
        while not self._is_running():
            time.sleep(LOOK_EVERY_S)
        self._job = read_join_info(self._run)
        if self._job.is_local:
            try:
                self._network = network_of(self._job.pid)
            except OSError as error:
                raise Failure(
                    "nobody is started again: the first server has gone before it could be: "
                    f"{error}"
                ) from None
        while self._coming or self._servers or self._is_running():
            if self._job.servers_return:
                self._look_after_servers()
            self._workers_due += self._lost() + self._died_before_joining()
            while self._workers_due and self._is_open():
                self._workers_due -= 1
                if self._failed_in_a_row < MOST_IN_A_ROW and self._is_running():
                    join = partial(join_run, self._run, trusts=True)
                    self._coming.add(self._fork(join))
            time.sleep(LOOK_EVERY_S)

    def _is_running(self) -> bool:
        """Returns whether the job can be joined, which ends when the job is over."""
        return join_file(self._run).exists()

    def _is_open(self) -> bool:
        """Returns whether all servers are there to let workers in, or the job is over."""
        assert self._job
        if not self._job.servers_return or not self._is_running():
            return True
        serving = {rank: self._is_serving(rank) for rank in self._servers}
        return 0 in serving and all(serving.values())

    def _is_serving(self, rank: int) -> bool:
        """Returns whether the newest server of this rank has begun, and has not ended in order."""
        restart = read_restart_info(self._run, rank)
        return restart is not None and restart.pid == self._servers[rank].pid

    def _look_after_servers(self) -> None:
        """Opens the memory of servers that have begun, and replaces servers that were killed."""
        assert self._job
        for rank in range(self._job.ranks):
            if rank not in self._servers:
                self._open_memory(rank)
        for rank, server in list(self._servers.items()):
            self._look_after_server(rank, server)

    def _open_memory(self, rank: int) -> None:
        """Opens the memory of the server of this rank, if there is one that has begun."""
        restart = read_restart_info(self._run, rank)
        if restart is None:
            return
        memory = f"/proc/{restart.pid:d}/fd/{restart.memory_fd:d}"
        # An OSError: the server was killed before its memory was opened here.
        with contextlib.suppress(OSError):
            if os.readlink(memory).startswith(f"/memfd:{MEMORY_NAME}"):
                memory_fd = os.open(memory, os.O_RDWR | os.O_CLOEXEC)
                self._servers[rank] = _Server(restart.pid, memory_fd)

    def _look_after_server(self, rank: int, server: "_Server") -> None:
        """Replaces the server if it was killed, and forgets it if it has ended in order."""
        has_ended = server.has_ended()
        if server.has_begun and not has_ended:
            return
        was_serving = self._is_serving(rank)
        server.has_begun |= was_serving
        if not has_ended:
            return
        del self._servers[rank]
        tries = server.tries
        if was_serving:
            restart_file(self._run, rank).unlink()
            if time.monotonic() - server.since > SOON_S:
                tries = 0
        if (was_serving or server.failed_to_begin) and tries < MOST_IN_A_ROW:
            self._servers[rank] = self._replacement(rank, server.memory_fd, tries)
            return
        os.close(server.memory_fd)
        if self._is_running() and (was_serving or server.tries):
            print(
                f"hvdtrain: the server of rank {rank} has ended {server.tries + 1} times in a row: "
                "it is not started again, and the others wait for it until --timeout",
                flush=True,
            )

    def _replacement(self, rank: int, memory_fd: int, tries: int) -> "_Server":
        """Returns a forked server that goes on with a killed server's memory.

        Args:
            tries: how many servers were forked for this rank since one that lasted.
        """
        assert self._job
        pause_s = PAUSE_S * (2**tries - 1)
        killed_at = time.time()
        come = partial(
            come_back, self._run, rank, self._job, memory_fd, killed_at, self._network, pause_s
        )
        return _Server(self._fork(come, memory_fd), memory_fd, tries + 1)

    def _lost(self) -> int:
        """Returns how many workers have been lost since the last look."""
        with self._lives_file.open("rb") as file:
            file.seek(self._lives_read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._lives_read += len(whole)
        lives = [json.loads(line) for line in whole.splitlines()]
        lost = 0
        for life in lives:
            if not life["why"] and life["pid"]:
                self._joined.setdefault(life["pid"], time.monotonic())
            elif life["why"] not in ("", LEFT) and life["pid"] not in self._replaced:
                lost += 1
        return lost

    def _died_before_joining(self) -> int:
        """Returns how many forked workers have ended since the last look before they had joined."""
        count = 0
        for pid in list(self._coming):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            self._coming.discard(pid)
            joined_at = self._joined.pop(pid, None)
            if status and joined_at is None:
                count += 1
                self._replaced.add(pid)
            self._count_failures(status, joined_at)
        return count

    def _count_failures(self, status: int, joined_at: float | None) -> None:
        """Counts the workers in a row that failed at once, and tells when they are too many.

        Args:
            status: the exit status of a worker that has ended.
            joined_at: when the worker joined, by time.monotonic; None if it has not.
        """
        if joined_at is not None:
            was_killed = os.WIFSIGNALED(status)
            if was_killed or time.monotonic() - joined_at > SOON_S:
                self._failed_in_a_row = 0
                return
        if not status:
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row == MOST_IN_A_ROW:
            print(
                f"hvdtrain: {self._failed_in_a_row} workers in a row failed at once: "
                "no more are started",
                flush=True,
            )

    def _fork(self, live: Callable[[], None], memory_fd: int = -1) -> int:
        """Forks a process that calls `live`, and returns its process id.

        Args:
            live: called in the forked process, which ends when the call returns.
            memory_fd: the file descriptor of the server's memory that the process keeps; it closes
                the other servers'.
        """
        sys.stdout.flush()
        own_pid = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(signal.SIGTERM)
        # SIGTERM may not end a worker: it waits, to leave in order, for servers that may be gone.
        end_with(own_pid)
        code = 1
        for server in self._servers.values():
            if server.memory_fd != memory_fd:
                os.close(server.memory_fd)
        try:
            live()
            code = 0
        except (UsageError, Failure) as error:
            print(f"hvdtrain: {error}")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


class _Server:
    """A server that is replaced if it is killed.

    Args:
        pid: the server's process.
        memory_fd: a file descriptor of the memory that has the server's state.
        tries: how many servers were forked for this rank since one that lasted, this one included.

    Attributes:
        since: when the server was first seen, by time.monotonic.
        has_begun: whether the server has begun to serve.
        failed_to_begin: whether the server ended before it had begun, with an error.
    """

    def __init__(self, pid: int, memory_fd: int, tries: int = 0) -> None:
        self.pid = pid
        self.memory_fd = memory_fd
        self.tries = tries
        self.has_begun = False
        self.failed_to_begin = False
        self.since = time.monotonic()
        self._pidfd: int | None = None
        # A ProcessLookupError: the server has ended since its memory was opened.
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Returns whether the process has ended. It is not called again after that."""
        if self._pidfd is not None:
            is_readable, _, _ = select.select([self._pidfd], [], [], 0)
            if not is_readable:
                return False
            os.close(self._pidfd)
        # A ChildProcessError: the job's starter has started this server, not this process.
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
            self.failed_to_begin = status != 0 and not self.has_begun
        return True


if __name__ == "__main__":
    try:
        preload(JOINING)
        Respawner(Path(sys.argv[1])).until_over()
    except (Failure, UsageError) as error:
        print(f"hvdtrain: {error}", flush=True)
    os._exit(0)  # libraries that are loaded print much when Python ends in order
