"""Running a launched job to its end: its output, requests to stop, and retries after failures."""

import errno
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import click

from hvdtrain.base.errors import Failure
from hvdtrain.base.formatting import recoded
from hvdtrain.base.system.preempt import (
    EXIT_CODE,
    ending_signals,
    handled_by,
    signals_unwind,
)
from hvdtrain.launch.job_log import failure_reason, job_failure
from hvdtrain.launch.processes import (
    ends_late,
    finishes,
    launched_job,
    lost_workers,
    respawner,
)
from hvdtrain.launch.recipe import LaunchCommand
from hvdtrain.runs.folder import how_to_go_on, last_saved_step, launch_folder, leave_file

STOP_TIMEOUT_S = 60.0  # how long ranks may take to save and leave after SIGTERM
USAGE_EXIT_CODE = 2


def log_file(out: Path) -> Path:
    """Returns the log, beside the run folder, to which a job's starter and ranks print."""
    return launch_folder(out) / "log"


def supervise(command: LaunchCommand, out: Path, retries: int, respawns: bool = False) -> None:
    """Runs a job to its end, and again after its last snapshot if it fails.

    A job that has written its results has not failed, whatever became of one of its ranks. A line
    says what did.

    Args:
        retries: how often it is started again.
        respawns: whether workers that are lost are started again, on this machine.

    Raises:
        Failure: the job failed, the last time too. It has the exit code of the rank that failed
            first.
        SystemExit: SIGTERM has stopped the job.
        KeyboardInterrupt: Ctrl-C has ended the job. It says how to continue.
    """
    log, summary = log_file(out), out / "summary.json"
    for attempt in range(1, retries + 2):
        leave_file(out).unlink(missing_ok=True)
        has_finished = finishes(summary)
        try:
            exit_code, was_stopped = _run_once(command, log, out, respawns)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(how_to_go_on(out, "launch")) from None
        finally:
            leave_file(out).unlink(missing_ok=True)
        # An mpirun that has lost all its hosts ends with exit code 0: only the summary proves
        # success.
        if exit_code == 0 and summary.is_file():
            return
        if has_finished() and not was_stopped:
            lost = "".join(f", rank {rank} was lost" for rank in lost_workers(summary))
            reason = failure_reason(log, exit_code, command.rank_of)
            click.echo(f"hvdtrain: {reason}; the others have finished the job{lost}", err=True)
            return
        if was_stopped:
            click.echo(
                f"hvdtrain: the job was asked to leave: {how_to_go_on(out, 'launch')}", err=True
            )
            raise SystemExit(EXIT_CODE)
        failure = job_failure(out, log, exit_code, command.rank_of)
        if attempt > retries or failure.exit_code == USAGE_EXIT_CODE:
            if failure.exit_code != USAGE_EXIT_CODE and last_saved_step(out) is not None:
                failure.args = (f"{failure}; {how_to_go_on(out, 'launch')}",)
            raise failure
        click.echo(f"hvdtrain: {failure}; starting again, {attempt} of {retries} times", err=True)
        log.rename(log.with_name(f"log.{attempt}"))


def hand_over(command: LaunchCommand, out: Path) -> bool:
    """Submits a job to a scheduler. The command's output is shown, and written to `log_file`.

    SIGTERM ends the command, unless the job can only be ended by the number that it prints.

    Returns:
        Whether SIGTERM came meanwhile.

    Raises:
        Failure: the scheduler did not take the job.
        SystemExit: SIGTERM came, and the scheduler may have taken the job or not.
    """
    exit_code, was_stopped = _run_once(command, log_file(out), out, False)
    if exit_code == 0:
        return was_stopped
    if was_stopped:
        raise SystemExit(EXIT_CODE)
    raise Failure(
        f"{command.argv[0]} did not take the job: {failure_reason(log_file(out), exit_code)}; "
        "submit it on a machine of the cluster, or choose --launcher local, ssh or mpi"
    )


class _StopRequest:
    """The request that the ranks save and leave, which a signal to this process makes.

    Args:
        ask: asks the ranks.

    Attributes:
        at: when the signal came, by time.monotonic(); None: it has not come.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self.at: float | None = None

    def take(self, number: int, _: object) -> None:
        """Takes a signal, as a handler. A second one ends this process, but for SIGHUP."""
        if self.at is None:
            self.at = time.monotonic()
            self._ask()
        elif number != signal.SIGHUP:  # which a shell and the system both send
            raise SystemExit(EXIT_CODE)


def _run_once(command: LaunchCommand, log: Path, out: Path, respawns: bool) -> tuple[int, bool]:
    """Runs a job to its end and shows its output.

    SIGTERM asks the ranks to save and leave, and so does SIGHUP. Ctrl-C, a second such signal, or
    STOP_TIMEOUT_S of waiting end the job on all hosts.

    Args:
        respawns: see supervise.

    Returns:
        The exit code, and whether the job was asked to stop.
    """
    stop = _StopRequest(lambda: _ask_to_leave(process, command, out, respawns))
    with (
        signals_unwind(),
        launched_job(command, log) as process,
        respawner(out, command, log) if respawns else nullcontext(lambda: False) as has_forks,
        log.open("rb") as output,
        handled_by(stop.take, *ending_signals()),
    ):
        last = b"\n"
        is_late = ends_late(out / "summary.json")
        while True:
            has_ended = False
            if process.poll() is not None:
                # A starter that was killed has taken ranks with it. Otherwise the last of its ranks
                # may have been started again.
                has_ended = process.returncode < 0 or not has_forks()
            has_ended = has_ended or is_late()
            lines = output.read().splitlines(keepends=True)
            if stop.at is not None:
                # The starter takes ranks that leave for failures, and prints a traceback.
                lines = [line for line in lines if re.match(rb"\[\d+\]<std", line)]
            last = lines[-1] if lines else last
            if has_ended and not last.endswith(b"\n"):
                lines.append(b"\n")  # messages about the job begin a new line
            _show(lines)
            if has_ended:
                return process.returncode or 0, stop.at is not None
            if stop.at is not None and time.monotonic() - stop.at > STOP_TIMEOUT_S:
                raise SystemExit(EXIT_CODE)
            time.sleep(0.1)


def _show(lines: Sequence[bytes]) -> None:
    """Shows a job's output. A terminal that was closed shows nothing: SIGHUP tells of that."""
    encoding = sys.stdout.encoding
    try:
        sys.stdout.buffer.writelines(recoded(line, encoding) for line in lines)
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def _ask_to_leave(
    process: "subprocess.Popen[bytes]", command: LaunchCommand, out: Path, respawns: bool
) -> None:
    """Asks the ranks to save and leave, by a signal to the starter or by a file.

    A submission goes on if its number is needed to end the job.
    """
    if command.tells_number:
        return
    # The starter passes no signal on, or does not know ranks that were started again.
    if command.stop_signal is None or respawns:
        leave_file(out).touch()
    if command.stop_signal is not None:
        process.send_signal(command.stop_signal)
