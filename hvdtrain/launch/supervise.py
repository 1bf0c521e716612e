"""Runs a launched job to its end: shows its output, passes on a request to stop, and starts it again after failures."""

import re
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import click

from hvdtrain.errors import Failure
from hvdtrain.launch.job_log import failure_reason, job_failure
from hvdtrain.launch.processes import ends_late, launched_job, respawner, sigterm_unwinds
from hvdtrain.launch.recipe import LaunchCommand
from hvdtrain.runs.folder import how_to_go_on, last_saved_step, launch_folder, leave_file
from hvdtrain.system.preempt import EXIT_CODE, handled_by

STOP_TIMEOUT_S = 60.0  # how long ranks may take to save and leave, after SIGTERM
USAGE_EXIT_CODE = 2


def log_file(out: Path) -> Path:
    """The log, beside the run folder, of what a job's starter and ranks print."""
    return launch_folder(out) / "log"


def supervise(command: LaunchCommand, out: Path, retries: int, respawns: bool = False) -> None:
    """Run a job. After a failure start it again, up to `retries` times: it goes on after its last snapshot.

    Args:
        respawns: start workers that are lost again, on this machine.

    Raises:
        Failure: it failed, the last time too; with the exit code of the rank that failed first.
        SystemExit: it was stopped by SIGTERM.
        KeyboardInterrupt: it was ended by Ctrl-C; with how to go on.
    """
    log = log_file(out)
    for attempt in range(1, retries + 2):
        leave_file(out).unlink(missing_ok=True)
        try:
            exit_code, was_stopped = _run_once(command, log, out, respawns)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(how_to_go_on(out, "launch")) from None
        finally:
            leave_file(out).unlink(missing_ok=True)
        # An mpirun that has lost all its hosts ends with exit code 0: only the summary proves success.
        if exit_code == 0 and (command.to_scheduler or (out / "summary.json").is_file()):
            return
        if was_stopped:
            click.echo(f"hvdtrain: the job was asked to leave: {how_to_go_on(out, 'launch')}", err=True)
            raise SystemExit(EXIT_CODE)
        if command.to_scheduler:
            raise Failure(
                f"{command.argv[0]} did not take the job: {failure_reason(log, exit_code)}; submit it on a machine "
                "of the cluster, or choose --launcher local, ssh or mpi"
            )
        failure = job_failure(out, log, exit_code, command.rank_of)
        if attempt > retries or failure.exit_code == USAGE_EXIT_CODE:
            if failure.exit_code != USAGE_EXIT_CODE and last_saved_step(out) is not None:
                failure.args = (f"{failure}; {how_to_go_on(out, 'launch')}",)
            raise failure
        click.echo(f"hvdtrain: {failure}; starting again, {attempt} of {retries} times", err=True)
        log.rename(log.with_name(f"log.{attempt}"))


def _run_once(command: LaunchCommand, log: Path, out: Path, respawns: bool) -> tuple[int, bool]:
    """Run a job to its end and show its output; return its exit code, and whether it was asked to stop.

    SIGTERM asks the ranks to save and leave. Ctrl-C, a second SIGTERM, or STOP_TIMEOUT_S of waiting end the job on all
    hosts.

    Where the starter passes no signal on, a file asks the ranks to stop.

    Args: as for supervise.
    """
    requested_at: list[float] = []

    def request_stop(*_: object) -> None:
        if requested_at:
            raise SystemExit(EXIT_CODE)
        requested_at.append(time.monotonic())
        if command.stop_signal is None or respawns:  # whom the respawner has started, the starter does not know
            leave_file(out).touch()
        if command.stop_signal is not None:
            process.send_signal(command.stop_signal)

    with (
        sigterm_unwinds(),
        launched_job(command, log) as process,
        respawner(out, command, log) if respawns else nullcontext(lambda: False) as has_forks,
        log.open("rb") as output,
        handled_by(request_stop, signal.SIGTERM),
    ):
        last, is_late = b"\n", ends_late(out / "summary.json")
        while True:
            # The last of its ranks may have been started again. A starter that was killed has taken ranks with it.
            has_ended = (process.poll() is not None and (process.returncode < 0 or not has_forks())) or is_late()
            lines = output.read().splitlines(keepends=True)
            if requested_at:  # ranks that leave are a failure to the starter, which prints a traceback
                lines = [line for line in lines if re.match(rb"\[\d+\]<std", line)]
            last = lines[-1] if lines else last
            if has_ended and not last.endswith(b"\n"):  # what is said of the job has a line of its own
                lines.append(b"\n")
            sys.stdout.buffer.writelines(lines)
            sys.stdout.flush()
            if has_ended:
                return process.returncode or 0, bool(requested_at)
            if requested_at and time.monotonic() - requested_at[0] > STOP_TIMEOUT_S:
                raise SystemExit(EXIT_CODE)
            time.sleep(0.1)
