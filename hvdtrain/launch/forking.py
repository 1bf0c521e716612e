"""Starts the process that ranks on this machine are forked from: see job/rank/fork_server.py."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.config.run_config import RunConfig

_GPUS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # one of them is there where a driver is
_LOOK_EVERY_S = 0.02
_BEGINS_WITHIN_S = 120.0  # on a busy machine with a cold disk
_ENDS_WITHIN_S = 10.0


def may_have_gpus() -> bool:
    """Returns whether this host may have GPUs. Torch, which would tell, takes a second to import."""
    return any(path.exists() for path in _GPUS)


def can_be_forked(launcher: Launcher, config: RunConfig) -> bool:
    """Returns whether a job's ranks may be forked: all are on this machine, and compute on CPUs.

    Where there is a GPU, a rank may use it, and drivers do not expect forks.
    """
    return launcher.local and (config.device == "cpu" or not may_have_gpus())


@contextlib.contextmanager
def fork_server(log: Path, meanwhile: Callable[[], object] = lambda: None) -> Iterator[str]:
    """Runs a fork server during the block.

    Args:
        log: the file that gets what the server prints.
        meanwhile: is called while the server begins, which takes one core some seconds.

    Yields:
        The path of the server's socket, which only this user may enter; empty if the server could
        not begin. Then ranks are started as new interpreters, which takes longer.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder, log.open("wb") as output:
        place = Path(folder, "socket")
        words = [sys.executable, "-Pm", "hvdtrain.job.rank.fork_server", str(place)]
        server = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for `compare`, which ends its ranks in order
        )
        try:
            meanwhile()
            yield str(place) if _begins(server, place) else ""
        finally:
            assert server.stdin
            server.stdin.close()
            try:
                server.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _begins(server: "subprocess.Popen[bytes]", place: Path) -> bool:
    """Blocks until the server listens. Returns whether it does."""
    deadline = time.monotonic() + _BEGINS_WITHIN_S
    while not place.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True
