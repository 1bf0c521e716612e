"""The log of a job, to which the starter and the ranks print: which rank failed, and why."""

import contextlib
import re
import signal
from collections.abc import Callable
from pathlib import Path

import click

from hvdtrain.base.config.untrusted import read_tail
from hvdtrain.base.errors import Failure

# None of the patterns backtracks far, since lines of a stranger's log may be long. Starters put
# `[RANK]<stdout>: ` before a rank's line.
_LINE = re.compile(r"(?:\[(\d{1,9})\]<std(?:out|err)>: ?)?(.*)")
# Reports of mpirun and horovodrun, and of srun, about the first process that fails: the exit code,
# or (mpirun) the signal.
_FIRST_EXIT = re.compile(r"Process name: (?:\[[^\s,]+,)?(\d{1,9})\]?\s+Exit code: +(\d{1,9})")
_FIRST_OF_SRUN = re.compile(
    r"srun: error: \S+: tasks? (\d{1,9})[\d,-]*: Exited with exit code (\d{1,9})"
)
_FIRST_SIGNAL = re.compile(
    r"process rank (\d{1,9}) with PID \d+ on node \S+ exited on\s+signal (\d{1,9})"
)
# Reports of MPI in a process that it ends because a peer is gone. The starter may report that
# process before the peer, or instead of it. Then the peer's rank is unknown.
_PEER_LOST = re.compile(
    r"^\[(\d{1,9})\]<stderr>: (?: +Peer host: +\S|.*An error occurred in Socket closed)",
    re.MULTILINE,
)
_SAID = re.compile(r"^\[\d+\]<stderr>: ?(.*\w.*)", re.MULTILINE)
_MESSAGE = re.compile(r"\s*hvdtrain: (.*\w.*)")
# Messages of ranks about a loss that the job survives, and about the return of a rank.
_SURVIVED = re.compile(r"the others go on without it|rank \d+ has joined|was killed and is back")

# How much is shown of the output of a rank that failed.
MAX_LINES = 12
MAX_LINE_LENGTH = 200
TAIL = 2**24  # bytes that are read at the end of a log


def log_text(log: Path) -> str:
    """Returns the end of a log; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return read_tail(log, TAIL).decode(errors="replace")
    return ""


def log_lines(log: Path) -> list[tuple[int | None, str]]:
    """Returns the lines of a job's log, each with the process that printed it.

    The process is the starter's number; None for lines of the starter.
    """
    lines = []
    for line in log_text(log).splitlines():
        match = _LINE.fullmatch(line)
        if match:
            process = None if match[1] is None else int(match[1])
            lines.append((process, match[2]))
    return lines


def first_failed(log: Path) -> tuple[int, int] | None:
    """Returns the process that failed first, by the starter's number, and its exit code.

    The exit code is 128 plus the signal's number if a signal ended the process, as in a shell. None
    if the log does not say.
    """
    text = log_text(log)
    if match := _FIRST_EXIT.search(text) or _FIRST_OF_SRUN.search(text):
        return int(match[1]), int(match[2])
    if match := _FIRST_SIGNAL.search(text):
        return int(match[1]), 128 + int(match[2])
    return None


def messages_of(log: Path, process: int | None = None) -> list[str]:
    """Returns hvdtrain's messages about failures in a job's log.

    Args:
        process: the starter's number of the process that printed them; None for all processes.
    """
    messages = []
    for printed_by, line in log_lines(log):
        match = _MESSAGE.match(line)
        if match and process in (None, printed_by) and not _SURVIVED.search(match[1]):
            messages.append(match[1].rstrip())
    return messages


def failure_reason(
    log: Path, exit_code: int | None, rank_of: Callable[[int], int] | None = None
) -> str:
    """Returns why a job failed, in one line, from the output of its ranks and their starter.

    Args:
        exit_code: the starter's exit code. Without it, the reason is empty if the output does not
            tell.
        rank_of: returns the rank of a process by the starter's number. Without it, the message has
            that number.
    """

    def name(process: int) -> str:
        return f"rank {rank_of(process)}" if rank_of else f"process {process}"

    lines = [(process, line.strip()) for process, line in log_lines(log) if re.search(r"\w", line)]
    messages = messages_of(log)
    first = first_failed(log)
    if first:
        process, code = first
        own_messages = messages_of(log, process)
        if own_messages:
            return own_messages[0]
        reason = f"{name(process)} {_describe_exit(code)}"
        printed = [line for printed_by, line in lines if printed_by == process]
        if printed:
            # A process that aborts says why before. Other signals leave no time for that.
            had_time = _signal_of(code) in (None, signal.SIGABRT)
            before = ": " if had_time else ", and had printed last: "
            reason += f"{before}{printed[-1]}"
        return f"{reason}; {messages[0]}" if messages else f"{reason} (see {log})"
    if messages:
        return messages[0]
    lost = _PEER_LOST.search(log_text(log))
    if lost:
        return f"another rank is gone: {name(int(lost[1]))} lost its connection (see {log})"
    if exit_code is None:
        return ""
    ending = f"exit code {exit_code}"
    if exit_code < 0:
        ending = f"its starter {_describe_exit(128 - exit_code)}"
    # A rank's last error, or the starter's last line, which tells what it could not clean up.
    said = _SAID.findall(log_text(log)) or [line for _, line in lines] or ["no output"]
    return f"{ending}: {said[-1]} (see {log})"


def _describe_exit(code: int) -> str:
    if code == 255:  # ssh's exit code in both cases
        return "was ended by a signal, or the ssh connection to its host broke"
    ended_by = _signal_of(code)
    return f"was ended by {ended_by.name}" if ended_by else f"ended with exit code {code}"


def _signal_of(code: int) -> signal.Signals | None:
    """Returns the signal that an exit code stands for, as shells have it."""
    with contextlib.suppress(ValueError):
        return signal.Signals(code - 128)
    return None


def job_failure(folder: Path, log: Path, exit_code: int, rank_of: Callable[[int], int]) -> Failure:
    """Returns the Failure to raise, with the exit code of the rank that failed first.

    Prints the last lines of that rank, unless it has said itself what was wrong.

    Args:
        folder: the run folder.
        log: the output of the starter and the ranks.
        exit_code: the starter's exit code, negative if a signal ended it.
        rank_of: returns the rank of a process by the starter's number.
    """
    first = first_failed(log)
    if first and not messages_of(log, first[0]):
        _print_last_lines(folder, rank_of(first[0]))
    failure = Failure(f"the job failed: {failure_reason(log, exit_code, rank_of)}")
    if first:
        failure.exit_code = first[1]
    elif exit_code < 0:
        failure.exit_code = 128 - exit_code
    else:
        failure.exit_code = exit_code or 1
    return failure


def _print_last_lines(folder: Path, rank: int) -> None:
    file = folder / "logs" / f"rank.{rank}.err"
    lines = log_text(file).splitlines()  # none if the rank failed before it opened the file
    if lines:
        click.echo(f"the last lines of rank {rank}, in {file}:", err=True)
    for line in lines[-MAX_LINES:]:
        click.echo(f"    {line[:MAX_LINE_LENGTH]}", err=True)
