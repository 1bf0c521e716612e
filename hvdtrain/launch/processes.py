"""Starts the ranks of a job as a launcher's recipe says, and sees to it that none outlives it."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.errors import Failure, UsageError
from hvdtrain.launch.recipe import Job, Start, expand

_OURS = re.compile(r"(?:\[\d+\]<std\w+>:)?hvdtrain: (.*)")  # horovodrun puts the rank before each line
GRACE_S = 5.0  # between asking ranks to stop and making them


@contextlib.contextmanager
def running(
    launcher: str, ranks: int, program: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A job of `program` on this machine while it runs, with variables beside those of the recipe; see `started`."""
    with started(expand(launcher, Job(ranks, program, environment=environment or {})), log) as process:
        yield process


@contextlib.contextmanager
def started(start: Start, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job while it runs; whatever is left of it here when the block ends, by an exception too, is ended.

    Args:
        log: takes what the launcher and the ranks print.

    Raises:
        Failure: the launcher cannot be started.
    """
    for path, text in start.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                start.words, env=start.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        except OSError as error:
            raise Failure(f"cannot start {start.words[0]}: {error.strerror}; see `hvdtrain doctor`") from None
        try:
            yield process
        finally:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a job: SIGTERM to its launcher, which ends the ranks, then, after GRACE_S, SIGKILL to whatever is left.

    Where the launcher has gone already, its ranks and what they started are told themselves.
    """
    family = _family(process.pid)
    if process.poll() is None:
        process.terminate()
    else:
        for orphan in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.terminate()
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    _, alive = psutil.wait_procs(family, timeout=max(0.0, deadline - time.monotonic()))
    survivors = list({*alive, *_family(process.pid)})  # and what was started meanwhile
    for survivor in survivors:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(survivors, timeout=GRACE_S)


def myself() -> dict[str, Any]:
    """What tells this process from every other, later ones with its number too."""
    own = psutil.Process()
    return {"pid": own.pid, "created": own.create_time(), "host": socket.gethostname()}


def end_recorded(known: Mapping[str, Any]) -> bool:
    """End the process that `myself` described, which ends what it started; False where it is gone.

    Raises:
        UsageError: it runs on another host.
    """
    if known["host"] != socket.gethostname():
        raise UsageError(f"its job was started on {known['host']}: stop it there")
    try:
        process = psutil.Process(known["pid"])
        if process.create_time() != known["created"]:
            return False
        process.terminate()
        process.wait(6 * GRACE_S)
    except psutil.NoSuchProcess:
        return False
    except psutil.TimeoutExpired:
        for child in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    return True


def _family(launcher: int) -> list[psutil.Process]:
    """All processes of the launcher's session, orphans too, and those below it that have left the session."""
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        found.update(psutil.Process(launcher).children(recursive=True))
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if pid != launcher and os.getsid(pid) == launcher:
                found.add(psutil.Process(pid))
    return list(found)


def reason(log: Path, code: int) -> str:
    """Why a job failed, in one line, from what its ranks printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [match[1] for line in lines if (match := _OURS.match(line))]
    return ours[0] if ours else f"exit code {code}: {lines[-1] if lines else 'no output'} (see {log})"


def _die_with_parent() -> None:
    """Linux: have the kernel end this process when its parent dies, however that happens."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM end the running job in order, as Ctrl-C does; exit code 143."""

    def unwind(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
