"""Jobs whose ranks are forked from a process that has torch loaded: real ranks, without two seconds of imports each.

Each rank is a process of its own, which finds itself in the environment as under torchrun, and runs the command line.
For tests of what ranks do; those of how they are started use the starters.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path

import psutil

FORKS = multiprocessing.get_context("forkserver")
atexit.register(forkserver._forkserver._stop)  # and wait for it: what it and its forks took is in `time`'s figures
GRACE_S = 0.5  # between asking the others to end and making them, as mpirun has it
PR_SET_PDEATHSIG = 1


def load_torch_once() -> None:
    # Libraries read the first when they are loaded, as ranks have it; Python 3.11 hands sys.path down in no other way.
    of_server = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    before = {name: os.environ.get(name) for name in of_server}
    os.environ.update(of_server)
    try:
        FORKS.set_forkserver_preload(["helpers.preloaded"])
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Forked:
    """A running job of forked ranks, with what tests use of a `Popen`. One that fails ends the others, as with mpirun.

    Args:
        words: the command line, as `train --mode ddp`.
        env: variables beside those of this process.
        first: Python code that each rank runs before all else.
        survive: let the others go on when one fails.
    """

    def __init__(
        self, ranks: int, words: Sequence[str], env: Mapping[str, str] | None = None, first="", survive=False
    ) -> None:
        load_torch_once()
        self.alone, self.survive = ranks == 1, survive
        self.returncode: int | None = None
        self.codes: list[int] = []  # in the order in which ranks ended
        handle, printed = tempfile.mkstemp(prefix="hvdtrain-forked-")
        os.close(handle)
        self.printed = Path(printed)
        port = _free_port()
        self.processes = []
        for rank in range(ranks):
            place = {} if self.alone else {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            environment = dict(os.environ) | dict(env or {}) | place
            process = FORKS.Process(target=_rank, args=(list(words), environment, os.getcwd(), printed, first))
            process.start()
            self.processes.append(process)
        self.left = list(self.processes)  # whose end `wait` has not seen

    def ranks(self) -> dict[int, psutil.Process]:
        return {rank: psutil.Process(process.pid) for rank, process in enumerate(self.processes) if process.is_alive()}

    def send_signal(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it may have ended since
                    os.kill(process.pid, number)

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
            ended = connection.wait([process.sentinel for process in self.left], max(0, deadline - time.monotonic()))
            if not ended:
                raise subprocess.TimeoutExpired("forked ranks", timeout)
            for process in [process for process in self.left if process.sentinel in ended]:
                process.join()
                self.codes.append(process.exitcode)
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
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
            process.kill()
            process.join()

    def communicate(self, timeout: float = 120) -> tuple[str, None]:
        """What was printed on stdout and stderr, when all have ended.

        Raises:
            subprocess.TimeoutExpired: some rank still runs; with what was printed, and where each thread is.
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
            process.kill()
            process.join()
        self.printed.unlink(missing_ok=True)


def _free_port() -> int:
    """Below those that the system chooses: one of them might be another process's before the first rank listens."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _rank(words: list[str], environment: dict[str, str], folder: str, printed: str, first: str) -> None:
    assert "torch" in sys.modules, "the process that forks ranks could not import helpers.preloaded, and says nothing"
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the process that forked it ends with the tests
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for path, flags, number in ((os.devnull, os.O_RDONLY, 0), (printed, os.O_WRONLY | os.O_APPEND, 1)):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    faulthandler.register(signal.SIGQUIT)
    sys.argv = ["hvdtrain", *words]
    exec(first, {"__name__": "__main__"})
    from hvdtrain.cli import main

    main()
