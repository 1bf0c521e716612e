"""Jobs whose ranks are forked from a process that has torch loaded: real ranks, without two seconds
of imports each.

Each rank is a process, which finds its place in the environment as under torchrun, and runs the
command line. For tests of what ranks do; those of how they are started use the starters.
"""

import atexit
import contextlib
import functools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from helpers.fork_proxy import through_first
from hvdtrain.launch.forked_rank import ask, number

GRACE_S = 0.5  # between asking the others to end and making them, as mpirun has it
# What commands that are forked import beyond what ranks do.
MORE = (
    "torch._dynamo",
    "hvdtrain.tools.checks.replay",
    "hvdtrain.tools.evaluate.command",
    "hvdtrain.comparing.command",
    "hvdtrain.comparing.report_command",
    "hvdtrain.launch.commands",
    "hvdtrain.reporting.page",
    "hvdtrain.reporting.plots",
    "hvdtrain.reporting.explaining.command",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "scipy.special",
    "markdown_it",
)
# The folder of the process that forks the ranks of all workers of pytest-xdist: it takes seconds to
# load what ranks need.
SHARED = "HVDTRAIN_TESTS_FORKS"
COULD_NOT_BEGIN = "the process that forks ranks could not begin: what it imports fails, see above"


@functools.cache
def fork_server() -> str:
    """Returns the socket of the process that forks ranks, and starts that if nobody has."""
    folder = os.environ.get(SHARED)
    if not folder:
        return str(_start_server(new_folder()))
    place = Path(folder) / "socket"
    with contextlib.suppress(OSError):  # another worker has asked
        os.close(os.open(Path(folder) / "asked", os.O_WRONLY | os.O_NONBLOCK))
    deadline = time.monotonic() + 90
    failure = place.with_name("failed")
    while not place.exists():
        waited_too_long = time.monotonic() > deadline
        assert not (waited_too_long or failure.exists()), COULD_NOT_BEGIN
        time.sleep(0.05)
    return str(place)


def share_fork_server() -> None:
    """Has the processes that this one starts share a process that forks ranks: it begins when the
    first of them asks, and ends with this process.
    """
    folder = new_folder()
    os.mkfifo(folder / "asked")
    os.environ[SHARED] = str(folder)

    def wait_and_start() -> None:
        with open(folder / "asked"):  # which waits for who opens it to write
            pass
        try:
            _start_server(folder)
        except AssertionError:  # which has to be told to the processes that wait
            (folder / "failed").touch()
            raise

    threading.Thread(target=wait_and_start, daemon=True).start()


def new_folder() -> Path:
    """Returns a new temporary folder."""
    base = os.environ.get("PRTE_MCA_prte_tmpdir_base")
    return Path(tempfile.mkdtemp(prefix="forks-", dir=base))


def _start_server(folder: Path) -> Path:
    """Returns the socket of a process that forks ranks, which ends with this process."""
    place = folder / "socket"
    # What libraries read when they are loaded, as ranks have it.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    words = [sys.executable, "-Pm", "hvdtrain.job.rank.fork_server", str(place), *MORE]
    server = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, start_new_session=True)
    # and wait for it: what its ranks took is in `time`'s figures then
    atexit.register(server.communicate)
    while not place.exists():
        assert server.poll() is None, COULD_NOT_BEGIN
        time.sleep(0.05)
    return place


class Rank:
    """A forked rank.

    Attributes:
        code: its exit code, negative for a signal; None while it runs.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.pid = connection, number(connection)
        self.code: int | None = None

    def fileno(self) -> int:
        """Can be read when it has ended."""
        return self.connection.fileno()

    def join(self) -> int:
        """Wait for its end."""
        if self.code is None:
            self.code = number(self.connection)
            self.connection.close()
        return self.code

    def send_signal(self, which: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended since
                os.kill(self.pid, which)


class Forked:
    """A running job of forked ranks, with what tests use of a `Popen`. One that fails ends the
    others, as with mpirun.

    Args:
        words: the command line, as `train --mode ddp`.
        env: variables beyond those of this process.
        first: Python code that each rank runs before all else.
        survive: let the others go on when one fails.
    """

    def __init__(
        self,
        ranks: int,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        first="",
        survive=False,
    ) -> None:
        self.alone, self.survive = ranks == 1, survive
        self.returncode: int | None = None
        self.codes: list[int] = []  # in the order in which ranks ended
        handle, printed = tempfile.mkstemp(prefix="hvdtrain-forked-")
        os.close(handle)
        self.printed = Path(printed)
        port = _free_port()
        self.processes = []
        with open(os.devnull) as nothing, self.printed.open("a") as out:
            for rank in range(ranks):
                place = (
                    {}
                    if self.alone
                    else {
                        "RANK": str(rank),
                        "WORLD_SIZE": str(ranks),
                        "LOCAL_RANK": str(rank),
                        "LOCAL_WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    }
                )
                connection = ask(
                    fork_server(),
                    (nothing.fileno(), out.fileno(), out.fileno()),
                    through_first(["python", "-Pm", "hvdtrain", *words], repr(first)),
                    os.environ | dict(env or {}) | place,
                    os.getcwd(),
                )
                self.processes.append(Rank(connection))
        self.left = list(self.processes)  # whose end `wait` has not seen

    def ranks(self) -> dict[int, psutil.Process]:
        alive = [
            (rank, process) for rank, process in enumerate(self.processes) if process.code is None
        ]
        ended, _, _ = select.select([process for _, process in alive], [], [], 0)
        return {
            rank: psutil.Process(process.pid) for rank, process in alive if process not in ended
        }

    def send_signal(self, which: int) -> None:
        for process in self.processes:
            process.send_signal(which)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float = 120) -> int:
        """The exit code, where 128 + N stands for a signal: that of the first that failed.

        Raises:
            subprocess.TimeoutExpired: some rank still runs.
        """
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            ended, _, _ = select.select(self.left, [], [], max(0, deadline - time.monotonic()))
            if not ended:
                raise subprocess.TimeoutExpired("forked ranks", timeout)
            for process in ended:
                self.codes.append(process.join())
                self.left.remove(process)
            if any(self.codes) and not self.survive:
                self._end_others()
            if not self.left or (any(self.codes) and not self.survive):
                failed = [code for code in self.codes if (code > 0 if self.survive else code)]
                code = failed[0] if failed else 0
                self.returncode = 128 - code if code < 0 and not self.alone else code
        return self.returncode

    def _end_others(self) -> None:
        self.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        for process in self.left:
            select.select([process], [], [], max(0, deadline - time.monotonic()))
            process.send_signal(signal.SIGKILL)
            process.join()

    def communicate(self, timeout: float = 120) -> tuple[str, None]:
        """What was printed on stdout and stderr, when all have ended.

        Raises:
            subprocess.TimeoutExpired: some rank still runs; with what was printed, and where each
            thread is.
        """
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired as error:
            self.send_signal(signal.SIGQUIT)
            time.sleep(1)
            error.add_note(self.printed.read_text())
            raise
        return self.printed.read_text(), None

    def close(self) -> None:
        """End what is left."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.join()
        self.printed.unlink(missing_ok=True)


def _free_port() -> int:
    """Below those that the system chooses: one of them might be another process's before the first
    rank listens.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
