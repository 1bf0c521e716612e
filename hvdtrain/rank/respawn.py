"""Starts lost ranks of a job on this machine again: `python -Pm hvdtrain.rank.respawn RUN`, beside the job's starter.

It has loaded torch while the job's ranks did, and forks: a worker is back within a fraction of a second, and the others
do not share their cores with two seconds of imports. It runs no thread and computes nothing itself, so that forks lack
nothing. Of each server it holds the memory open that has what the server knows (see ps.crash_memory): whoever it forks
in place of one that is killed goes on with that.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hvdtrain.coordination.join_info import JoinInfo, join_file, read_join_info, read_restart_info, restart_file
from hvdtrain.coordination.membership_log import LEFT, membership_file
from hvdtrain.errors import Failure, UsageError
from hvdtrain.launch.private_network import network_of
from hvdtrain.ps.crash_memory import MEMORY_NAME
from hvdtrain.rank.comeback import come_back
from hvdtrain.rank.join import join_run
from hvdtrain.rank.process import set_threads
from hvdtrain.system.memory import importing
from hvdtrain.system.parent import die_with_parent, end_with

# What those that it forks import on their way. None of it starts a thread, which a fork would not have.
PRELOADED = (
    "hvdtrain.rank.work", "hvdtrain.modes.ps_async", "hvdtrain.modes.ps_ssp", "hvdtrain.wire.zeromq",
    "torch.utils.tensorboard", "torch.nested._internal.nested_tensor", "PIL.PngImagePlugin", "PIL.JpegImagePlugin",
    "numpy.random", "platformdirs",
)  # fmt: skip
LOOK_EVERY_S = 0.05
# Workers that fail before they have joined or so soon after, and servers that end so soon: something else is wrong.
MOST_IN_A_ROW, SOON_S = 5, 5.0
PAUSE_S = 0.25  # before a server's second try, and twice as much more before each after that: a disk may be full


class Respawner:
    """Forks workers that join the run, one for each that is lost, and servers in place of those that are killed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.lives = membership_file(run)
        self.read = 0  # bytes of it
        self.joined: dict[int, float] = {}  # processes that have, and when that was seen, by time.monotonic
        self.coming: set[int] = set()  # those that have not ended
        self.replaced: set[int] = set()  # those that ended while they waited to join: the servers may learn it later
        self.in_a_row = self.due = 0  # workers that failed at once, and those that are to be started
        self.servers: dict[int, _Server] = {}  # by rank, those that come back if they are killed
        self.network: dict[str, int] = {}  # the job's
        self.job: JoinInfo | None = None

    def until_over(self) -> None:
        """Return when the job is over."""
        while not join_file(self.run).exists():
            time.sleep(LOOK_EVERY_S)
        self.job = read_join_info(self.run)
        if self.job.is_local:
            try:
                self.network = network_of(self.job.pid)
            except OSError as error:
                raise Failure(
                    f"nobody is started again: the first server has gone before it could be: {error}"
                ) from None
        while self.coming or self.servers or join_file(self.run).exists():
            if self.job.servers_return:
                self._look_after_servers()
            self.due += self._lost() + self._died_before_joining()
            while self.due and self._is_open():
                self.due -= 1
                if self.in_a_row < MOST_IN_A_ROW and join_file(self.run).exists():
                    self.coming.add(self._fork(partial(join_run, self.run, trusts=True)))
            time.sleep(LOOK_EVERY_S)

    def _is_open(self) -> bool:
        """Whether all servers are there, who let workers in; or the job is over."""
        assert self.job
        if not self.job.servers_return or not join_file(self.run).exists():
            return True
        restarts = {rank: read_restart_info(self.run, rank) for rank in self.servers}
        return 0 in restarts and all(
            restart is not None and restart.pid == self.servers[rank].pid for rank, restart in restarts.items()
        )

    def _look_after_servers(self) -> None:
        """Hold what each of them has, and fork another in place of one that was killed."""
        assert self.job
        for rank in range(self.job.ranks):
            if rank not in self.servers and (restart := read_restart_info(self.run, rank)):
                memory = f"/proc/{restart.pid:d}/fd/{restart.memory_fd:d}"
                with contextlib.suppress(OSError):  # it was killed before anybody held what it has
                    if os.readlink(memory).startswith(f"/memfd:{MEMORY_NAME}"):
                        self.servers[rank] = _Server(restart.pid, os.open(memory, os.O_RDWR | os.O_CLOEXEC))
        for rank, server in list(self.servers.items()):
            has_ended = server.has_ended()
            if server.has_begun and not has_ended:
                continue
            restart = read_restart_info(self.run, rank)  # one that ends in order takes it away
            was_serving = restart is not None and restart.pid == server.pid
            server.has_begun |= was_serving
            if not has_ended:
                continue
            del self.servers[rank]
            if was_serving:
                restart_file(self.run, rank).unlink()
            tries = 0 if was_serving and time.monotonic() - server.since > SOON_S else server.tries
            if (was_serving or server.failed_to_begin) and tries < MOST_IN_A_ROW:
                pause_s = PAUSE_S * (2**tries - 1)
                come = partial(
                    come_back, self.run, rank, self.job, server.memory_fd, time.time(), self.network, pause_s
                )
                self.servers[rank] = _Server(self._fork(come, server.memory_fd), server.memory_fd, tries + 1)
            else:
                os.close(server.memory_fd)
                if join_file(self.run).exists() and (was_serving or server.tries):
                    print(
                        f"hvdtrain: the server of rank {rank} has ended {server.tries + 1} times in a row: it is not "
                        "started again, and the others wait for it until --timeout",
                        flush=True,
                    )

    def _lost(self) -> int:
        """How many workers have been lost since the last look."""
        with self.lives.open("rb") as file:
            file.seek(self.read)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self.read += len(whole)
        lives = [json.loads(line) for line in whole.splitlines()]
        for life in lives:
            if not life["why"] and life["pid"]:
                self.joined.setdefault(life["pid"], time.monotonic())
        return sum(life["why"] not in ("", LEFT) and life["pid"] not in self.replaced for life in lives)

    def _died_before_joining(self) -> int:
        """How many processes have ended since the last look before they had joined."""
        count = 0
        for pid in list(self.coming):
            ended, code = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            self.coming.discard(pid)
            joined = self.joined.pop(pid, None)
            if code and joined is None:
                count += 1
                self.replaced.add(pid)
            if joined is not None and (os.WIFSIGNALED(code) or time.monotonic() - joined > SOON_S):
                self.in_a_row = 0
            elif code:
                self.in_a_row += 1
                if self.in_a_row == MOST_IN_A_ROW:
                    print(f"hvdtrain: {self.in_a_row} workers in a row failed at once: no more are started", flush=True)
        return count

    def _fork(self, live: Callable[[], None], memory_fd: int = -1) -> int:
        """A process that does this, and has that memory of a server's and no other."""
        sys.stdout.flush()
        own_pid = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(signal.SIGTERM)
        end_with(own_pid)  # a worker that is to leave in order waits for servers, who may be gone too
        code = 1
        for server in self.servers.values():
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
    """A server that comes back if it is killed.

    Args:
        memory_fd: a file descriptor of the memory that has what it knows.
        tries: how many processes in a row were forked for it that ended soon.

    Attributes:
        since: when it was first seen, by time.monotonic.
        has_begun: to serve.
        failed_to_begin: it ended otherwise than in order before it had begun.
    """

    def __init__(self, pid: int, memory_fd: int, tries: int = 0) -> None:
        self.pid, self.memory_fd, self.tries = pid, memory_fd, tries
        self.has_begun = self.failed_to_begin = False
        self.since = time.monotonic()
        self._ended: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended since its memory was opened
            self._ended = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        if self._ended is not None:
            if not select.select([self._ended], [], [], 0)[0]:
                return False
            os.close(self._ended)
        with contextlib.suppress(ChildProcessError):
            self.failed_to_begin = bool(os.waitpid(self.pid, 0)[1]) and not self.has_begun
        return True


if __name__ == "__main__":
    set_threads(1, is_server=False)  # until a worker knows better
    with importing():
        for name in PRELOADED:
            importlib.import_module(name)
    try:
        Respawner(Path(sys.argv[1])).until_over()
    except (Failure, UsageError) as error:
        print(f"hvdtrain: {error}", flush=True)
    os._exit(0)  # libraries that it has loaded have much to say of how Python ends
