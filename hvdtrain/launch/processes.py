"""Starts the ranks of a job as a launcher's recipe says, and sees to it that none outlives it."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.errors import Failure, UsageError
from hvdtrain.launch.recipe import Job, Start, expand
from hvdtrain.orphan import runs

_MARKED = re.compile(r"(?:\[(\d+)\]<std(?:out|err)>: ?)?(.*)")  # starters put a rank's number before its lines
# What starters say of the first process to fail: mpirun and horovodrun of an exit code, mpirun of a signal.
_FIRST_EXIT = re.compile(r"Process name: (?:\[.*,)?(\d+)\]?\s+Exit code: +(\d+)")
_FIRST_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on\s+signal (\d+)")
# MPI ends a process that loses a peer: it may be told of before the peer is, which nobody can name then.
_PEER_LOST = re.compile(r"\[(\d+)\]<stderr>: +Peer host: +(\S+)")
_SOCKET_CLOSED = re.compile(r"\[(\d+)\]<stderr>: .*An error occurred in Socket closed")  # the same, in fewer words
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

    Where the launcher has gone already, its ranks and what they started are told themselves. Ctrl-C and SIGTERM do not
    wait for GRACE_S, and do what they do when all is ended.
    """
    with _held(signal.SIGINT, signal.SIGTERM) as impatient:
        family = _family(process.pid)
        if process.poll() is None:
            process.terminate()
        else:
            for orphan in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    orphan.terminate()
        deadline = time.monotonic() + GRACE_S
        while process.poll() is None and time.monotonic() < deadline and not impatient:
            time.sleep(0.02)
        alive = _wait(family, deadline - time.monotonic(), impatient)
        survivors = list({*alive, *_family(process.pid)})  # and what was started meanwhile
        for survivor in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
        process.kill()
        process.wait()
        _wait(survivors, GRACE_S)


@contextlib.contextmanager
def _held(*signals: signal.Signals) -> Iterator[list[int]]:
    """These signals have their effect when the block is over; the list has those that came so far."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in signals}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for first in came[:1]:
        signal.raise_signal(first)


def myself() -> dict[str, Any]:
    """What tells this process from every other, later ones with its number too."""
    own = psutil.Process()
    return {"pid": own.pid, "created": own.create_time(), "host": socket.gethostname()}


def still_runs(known: Mapping[str, Any]) -> bool:
    """Whether the process that `myself` described is there, as far as this host can tell."""
    try:
        if known["host"] != socket.gethostname():
            return False
        process = psutil.Process(known["pid"])
        return process.create_time() == known["created"] and runs(process)
    except (KeyError, TypeError, ValueError, psutil.NoSuchProcess):
        return False


def end_recorded(known: Mapping[str, Any], patience: float) -> bool:
    """End the process that `myself` described, which ends what it started; False where it is gone.

    Args:
        patience: seconds that it may take before it is made to.

    Raises:
        UsageError: it runs on another host.
    """
    if known["host"] != socket.gethostname():
        raise UsageError(f"its job was started on {known['host']}: stop it there")
    try:
        process = psutil.Process(known["pid"])
        if not still_runs(known):
            return False
        process.terminate()
        for left in _wait([process], patience + 3 * GRACE_S):
            for child in [*left.children(recursive=True), left]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
    except (psutil.NoSuchProcess, ValueError):
        return False
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
    return [process for process in found if runs(process)]


def _wait(processes: list[psutil.Process], seconds: float, impatient: Sequence[int] = ()) -> list[psutil.Process]:
    """Those that still run after so many seconds at most, or when there is an impatient signal."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if runs(process)]) and time.monotonic() < deadline:
        if impatient:
            break
        time.sleep(0.02)
    return left


def printed(log: Path) -> list[tuple[int | None, str]]:
    """The lines of a job's log, without the mark of who printed each: that comes first, None where it was no rank."""
    lines = log.read_text(errors="replace").splitlines()
    marked = [match for line in lines if (match := _MARKED.fullmatch(line))]
    return [(None if match[1] is None else int(match[1]), match[2]) for match in marked]


def first_failed(log: Path) -> tuple[int, int] | None:
    """The number of the process that failed first, as its starter counts, and its exit code; None if nobody told.

    The code of a process that a signal ended is 128 and the signal's number, as shells have it.
    """
    text = log.read_text(errors="replace")
    if match := _FIRST_EXIT.search(text):
        return int(match[1]), int(match[2])
    if match := _FIRST_SIGNAL.search(text):
        return int(match[1]), 128 + int(match[2])
    return None


def reason(log: Path, code: int, rank_of: Callable[[int], int] | None = None) -> str:
    """Why a job failed, in one line, from what its ranks and their starter printed.

    Args:
        rank_of: the rank of a process that the starter gives a number; without it, the number is told as a process's.
    """
    lines = [(who, line.strip()) for who, line in printed(log) if re.search(r"\w", line)]
    ours = [(who, line.removeprefix("hvdtrain: ")) for who, line in lines if line.startswith("hvdtrain: ")]
    first = first_failed(log)
    if first is None:
        if ours:
            return ours[0][1]
        text = log.read_text(errors="replace")
        if lost := _PEER_LOST.search(text):
            return f"a rank on {lost[2]} is gone: {_name(int(lost[1]), rank_of)} lost its connection (see {log})"
        if lost := _SOCKET_CLOSED.search(text):
            return f"another rank is gone: {_name(int(lost[1]), rank_of)} lost its connection (see {log})"
        return f"exit code {code}: {lines[-1][1] if lines else 'no output'} (see {log})"
    process, code = first
    if own := [line for who, line in ours if who == process]:
        return own[0]
    said = [line for who, line in lines if who == process]
    ended = f"{_name(process, rank_of)} {_ending(code)}" + (f": {said[-1]}" if said else "")
    return f"{ended}; {ours[0][1]}" if ours else f"{ended} (see {log})"


def _name(process: int, rank_of: Callable[[int], int] | None) -> str:
    return f"rank {rank_of(process)}" if rank_of else f"process {process}"


def _ending(code: int) -> str:
    """What an exit code tells."""
    if code == 255:  # what ssh ends with in both cases
        return "was ended by a signal, or the ssh connection to its host broke"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


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
