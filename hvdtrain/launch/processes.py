"""Starts the processes of a job on this machine, and makes sure that none of them outlives it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from hvdtrain.config import recipes
from hvdtrain.coordination.join_info import remove_join_files
from hvdtrain.errors import Failure, UsageError
from hvdtrain.launch.private_network import enter_private_network, variables_of
from hvdtrain.launch.recipe import JobSpec, LaunchCommand, expand
from hvdtrain.launch.records import is_running
from hvdtrain.system.parent import die_with_parent, is_alive
from hvdtrain.system.preempt import EXIT_CODE, handled_by

GRACE_S = 5.0  # from SIGTERM to SIGKILL
END_AFTER_SUMMARY_S = 30.0  # how long the ranks of a job may take to end after its summary is written
FORK_S = 1.0  # within which another rank has begun in place of one that was lost


def local_job(
    ranks: int, program: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """`launched_job` for a program on this machine; environment: variables for the ranks beside the recipe's."""
    return launched_job(expand(recipes.launcher("local"), JobSpec(ranks, program, environment=environment or {})), log)


@contextlib.contextmanager
def launched_job(command: LaunchCommand, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job. When the block ends, by an exception too, whatever still runs of it on this machine is ended.

    Args:
        log: gets what the starter and the ranks print.

    Raises:
        Failure: the starter cannot be started.
    """
    # The job sees another folder there: see private_network.py. mpirun, which ends in the folder /, removes files.
    scratch = log.parent.resolve() / f"{log.name}.tmp"
    scheduler_has_it, private = False, partial(os.open, mode=0o600)
    try:
        for path, text in command.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with open(path, "w", opener=private if path == command.secrets_file else None) as file:
                file.write(text)
        log.write_bytes(b"")
        with log.open("ab") as output:  # where others write too
            scratch.mkdir(exist_ok=True)
            process = _start_job(command, output, scratch)
            try:
                yield process
            finally:
                _end_job(process)
                scheduler_has_it = command.to_scheduler and process.returncode == 0
    finally:
        with contextlib.suppress(OSError):
            scratch.rmdir()
        if command.secrets_file and not scheduler_has_it:
            command.secrets_file.unlink(missing_ok=True)


def ends_late(summary: Path) -> Callable[[], bool]:
    """For a job that begins now: a function that says, when it is asked again and again, whether the job wrote this
    summary END_AFTER_SUMMARY_S ago. Then it need not be waited for: a worker hangs that the others have given up, or
    mpirun itself, which may miss the end of its last ranks (openpmix/prrte, issue 1839).
    """

    def written_at() -> int:
        return summary.stat().st_mtime_ns if summary.is_file() else 0

    earlier, deadline = written_at(), 0.0

    def is_late() -> bool:
        nonlocal deadline
        if written_at() in (0, earlier):  # none, or that of a job which this one goes on with
            return False
        deadline = deadline or time.monotonic() + END_AFTER_SUMMARY_S
        return time.monotonic() > deadline

    return is_late


@contextlib.contextmanager
def respawner(run: Path, command: LaunchCommand, log: Path) -> Iterator[Callable[[], bool]]:
    """In the block, lost ranks of the job that runs in the folder are started again, on this machine.

    Args:
        log: gets what they print, beside the job's.

    Yields:
        A function that says whether ranks that were started again run, or may begin to run in FORK_S.
    """
    remove_join_files(run)  # of a job that was killed
    with log.open("ab") as output:
        words = [sys.executable, "-Pm", "hvdtrain.rank.respawn", str(run)]
        process = _start(words, command.environment, output, partial(die_with_parent, signal.SIGTERM))
        until = 0.0

        def has_forks() -> bool:
            nonlocal until
            if not until or len(_job_processes(process)) > 1:
                until = time.monotonic() + FORK_S
            return process.poll() is None and time.monotonic() < until

        try:
            yield has_forks
        finally:
            _end_job(process)
            remove_join_files(run)  # one has the job's key


def _start_job(command: LaunchCommand, output: IO[bytes], scratch: Path) -> "subprocess.Popen[bytes]":
    """As launched_job."""
    try:
        if command.private_network:
            environment = command.environment | variables_of(scratch)
            with contextlib.suppress(subprocess.SubprocessError):  # where the system does not allow it: without
                return _start(command.argv, environment, output, partial(_die_with_parent_in_private_network, scratch))
        return _start(command.argv, command.environment, output, partial(die_with_parent, signal.SIGTERM))
    except FileNotFoundError:
        raise Failure(
            f"{command.argv[0]} is not on this machine: start the job where it is, or choose another --launcher; "
            "`hvdtrain doctor` says what is here"
        ) from None
    except OSError as error:
        raise Failure(f"cannot start {command.argv[0]}: {error.strerror}; see `hvdtrain doctor`") from None


def _start(
    words: Sequence[str], environment: Mapping[str, str], output: IO[bytes], prepare: Callable[[], None]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=prepare,
    )  # fmt: skip


def _end_job(starter: "subprocess.Popen[bytes]") -> None:
    """End a job: SIGTERM to its starter, which ends the ranks, then, after GRACE_S, SIGKILL to whatever is left.

    Where the starter has ended already, SIGTERM goes to the ranks and to what they started. Ctrl-C or SIGTERM cuts
    GRACE_S short, and has its own effect once all processes are ended.
    """
    received: list[int] = []
    with handled_by(lambda number, _: received.append(number), signal.SIGINT, signal.SIGTERM):
        processes = _job_processes(starter)
        for process in [starter] if starter.poll() is None else processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        alive = _wait(processes, GRACE_S, received)
        remaining = list({*alive, *_job_processes(starter)})  # some may have been started meanwhile
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        starter.wait()
        _wait(remaining, GRACE_S)
    for first in received[:1]:
        signal.raise_signal(first)


def end_process(out: Path, record: Mapping[str, Any], timeout_s: float) -> bool:
    """End the process of a run folder's record, which ends what it started; False where it has ended already.

    Args:
        timeout_s: how long it may take to end its job in order; it and its children are killed some seconds later.

    Raises:
        UsageError: it runs on another host.
        Failure: it is another user's.
    """
    if record["host"] != socket.gethostname():
        raise UsageError(f"its job was started on {record['host']}: stop it there")
    if not is_running(out, record):
        return False
    try:
        process = psutil.Process(record["pid"])
        process.terminate()
        for left in _wait([process], timeout_s + 3 * GRACE_S):
            for child in [*left.children(recursive=True), left]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        raise Failure(f"its job is another user's: ask {process.username()} to stop it") from None
    return True


def _job_processes(starter: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The starter, all processes of its session, orphans too, and its descendants that have left the session."""
    processes = set()
    if starter.returncode is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(starter.pid)
            processes.update([process, *process.children(recursive=True)])
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) == starter.pid:
                processes.add(psutil.Process(pid))
    return [process for process in processes if is_alive(process)]


def _wait(processes: list[psutil.Process], timeout_s: float, received: Sequence[int] = ()) -> list[psutil.Process]:
    """Wait for processes to end, until the timeout or a received signal; return those that still run."""
    deadline = time.monotonic() + timeout_s
    while (left := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        if received:
            break
        time.sleep(0.02)
    return left


def _die_with_parent_in_private_network(scratch: Path) -> None:
    enter_private_network(scratch)
    die_with_parent(signal.SIGTERM)


def sigterm_unwinds() -> contextlib.AbstractContextManager[None]:
    """Have SIGTERM raise SystemExit(143), so that it ends a running job in order, as Ctrl-C does."""

    def unwind(*_: object) -> None:
        raise SystemExit(EXIT_CODE)

    return handled_by(unwind, signal.SIGTERM)
