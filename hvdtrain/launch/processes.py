"""Starting the processes of a job on this machine, none of which outlives the job."""

import contextlib
import json
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

from hvdtrain.base.config import recipes
from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.system.parent import die_with_parent, is_alive
from hvdtrain.base.system.preempt import ending_signals, handled_by
from hvdtrain.launch.private_network import enter_private_network, variables_of
from hvdtrain.launch.recipe import JobSpec, LaunchCommand, expand
from hvdtrain.launch.records import is_running
from hvdtrain.runs.join_info import remove_join_files

GRACE_S = 5.0  # from SIGTERM to SIGKILL
END_AFTER_SUMMARY_S = 30.0  # how long ranks may take to end after the summary is written
LOOK_EVERY_S = 0.1  # how often it is looked how far a job is
END_WITHOUT_LOST_S = 3.0  # the same, of a job that has gone on without a worker, which may hang
FORK_S = 1.0  # how long a rank may take to begin in place of one that was lost


def local_job(
    ranks: int, program: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """Returns `launched_job` for a program on this machine.

    Args:
        environment: variables for the ranks, beside the recipe's.
    """
    spec = JobSpec(ranks, program, environment=environment or {})
    return launched_job(expand(recipes.launcher("local"), spec), log)


@contextlib.contextmanager
def launched_job(command: LaunchCommand, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a job, and ends its processes on this machine when the block ends.

    Args:
        log: the file that gets the output of the starter and the ranks.

    Raises:
        Failure: the starter cannot be started.
    """
    # The job sees another folder there: see private_network.py. The path is absolute since mpirun,
    # which removes files at its end, is in the folder / then.
    scratch = log.parent.resolve() / f"{log.name}.tmp"
    scheduler_has_it = False
    try:
        for path, text in command.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text, mode=0o600 if path == command.secrets_file else 0o666)
        log.write_bytes(b"")
        with log.open("ab") as output:  # appended to, since others write there too
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


def still_runs(job: "subprocess.Popen[bytes]") -> bool:
    """Blocks for LOOK_EVERY_S, or until the job ends. Returns whether it still runs."""
    try:
        job.wait(LOOK_EVERY_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def ends_late(summary: Path) -> Callable[[], bool]:
    """Returns a function that says whether a job, which begins now, takes too long to end.

    It is called again and again, and true END_AFTER_SUMMARY_S after the job has written its
    summary, or END_WITHOUT_LOST_S. Then a worker hangs that the others have given up, or mpirun
    does, which may miss the end of its last ranks (openpmix/prrte, issue 1839).
    """
    has_finished = finishes(summary)
    deadline = 0.0

    def is_late() -> bool:
        nonlocal deadline
        if not has_finished():
            return False
        if not deadline:
            left_s = END_WITHOUT_LOST_S if lost_workers(summary) else END_AFTER_SUMMARY_S
            deadline = time.monotonic() + left_s
        return time.monotonic() > deadline

    return is_late


def finishes(summary: Path) -> Callable[[], bool]:
    """Returns a function that says whether a job, which begins now, has written its summary.

    The summary is the last file that a job writes. One that exists now is of the run that the job
    continues.
    """

    def written_at() -> int:
        return summary.stat().st_mtime_ns if summary.is_file() else 0

    earlier = written_at()
    return lambda: written_at() not in (0, earlier)


def lost_workers(summary: Path) -> list[int]:
    """Returns the ranks that a job had lost and was without at its end, from its summary."""
    found: list[int] = json.loads(summary.read_text(encoding="utf-8")).get("lost_workers", [])
    return found


@contextlib.contextmanager
def respawner(run: Path, command: LaunchCommand, log: Path) -> Iterator[Callable[[], bool]]:
    """Starts lost ranks of the folder's job again, on this machine, during the block.

    Args:
        log: the job's log, which gets their output too.

    Yields:
        A function that says whether such ranks run, or may begin to run within FORK_S.
    """
    remove_join_files(run)  # a killed job may have left some
    with log.open("ab") as output:
        words = [sys.executable, "-Pm", "hvdtrain.job.rank.respawn", str(run)]
        process = _start(
            words, command.environment, output, partial(die_with_parent, signal.SIGTERM)
        )
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
            remove_join_files(run)  # one of them has the job's key


def _start_job(
    command: LaunchCommand, output: IO[bytes], scratch: Path
) -> "subprocess.Popen[bytes]":
    """Starts a job's starter, in a private network if the command asks for it and it is possible.

    Raises:
        Failure: the starter cannot be started.
    """
    try:
        if command.private_network:
            environment = command.environment | variables_of(scratch)
            prepare = partial(_die_with_parent_in_private_network, scratch)
            with contextlib.suppress(subprocess.SubprocessError):  # the system does not allow it
                return _start(command.argv, environment, output, prepare)
        return _start(
            command.argv, command.environment, output, partial(die_with_parent, signal.SIGTERM)
        )
    except FileNotFoundError:
        raise Failure(
            f"{command.argv[0]} is not on this machine: start the job where it is, or choose "
            "another --launcher; `hvdtrain doctor` says what is here"
        ) from None
    except OSError as error:
        raise Failure(
            f"cannot start {command.argv[0]}: {error.strerror}; see `hvdtrain doctor`"
        ) from None


def _start(
    words: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes],
    prepare: Callable[[], None],
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=prepare,
    )


def _end_job(starter: "subprocess.Popen[bytes]") -> None:
    """Ends a job: SIGTERM to its starter, which ends the ranks, and SIGKILL after GRACE_S.

    If the starter has ended already, SIGTERM goes to the ranks and their children. Ctrl-C, SIGTERM
    or SIGHUP for this process cuts GRACE_S short, and takes effect once all processes are ended.
    """
    received: list[int] = []
    with handled_by(lambda number, _: received.append(number), signal.SIGINT, *ending_signals()):
        processes = _job_processes(starter)
        for process in [starter] if starter.poll() is None else processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        alive = _wait(processes, GRACE_S, received)
        # Some may have been started meanwhile.
        remaining = list({*alive, *_job_processes(starter)})
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        starter.wait()
        _wait(remaining, GRACE_S)
    for first in received[:1]:
        signal.raise_signal(first)


def end_process(out: Path, record: Mapping[str, Any], timeout_s: float) -> bool:
    """Ends the process of a run folder's record, which ends its job.

    Args:
        timeout_s: how long the process may take to end its job in order. It and its children are
            killed some seconds later.

    Returns:
        False if the process has ended already.

    Raises:
        UsageError: the process runs on another host.
        Failure: the process is another user's.
    """
    if record["host"] != socket.gethostname():
        raise UsageError(f"its job was started on {record['host']}: stop it there")
    if not is_running(out, record):
        return False
    try:
        process = psutil.Process(record["pid"])
        process.terminate()
        if _wait([process], timeout_s + 3 * GRACE_S):
            for member in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        raise Failure(f"its job is another user's: ask {process.username()} to stop it") from None
    return True


def _job_processes(starter: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Returns the starter, all processes of its session, and its descendants outside the session.

    Orphans of the session are among them.
    """
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


def _wait(
    processes: list[psutil.Process], timeout_s: float, received: Sequence[int] = ()
) -> list[psutil.Process]:
    """Blocks until the processes have ended, the timeout is over, or a signal is received.

    Returns:
        The processes that still run.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        alive = [process for process in processes if is_alive(process)]
        if not alive or received or time.monotonic() >= deadline:
            return alive
        time.sleep(0.02)


def _die_with_parent_in_private_network(scratch: Path) -> None:
    enter_private_network(scratch)
    die_with_parent(signal.SIGTERM)
