"""Reads the log of a job, which has what its starter and its ranks printed: lines by rank, and why it failed."""

import contextlib
import re
import signal
from collections.abc import Callable
from pathlib import Path

import click

from hvdtrain.config.untrusted import read_whole
from hvdtrain.errors import Failure

_LINE = re.compile(r"(?:\[(\d+)\]<std(?:out|err)>: ?)?(.*)")  # starters put `[RANK]<stdout>: ` before a rank's lines
# What mpirun and horovodrun, and srun, print about the first process that fails: its exit code, or (mpirun) a signal.
_FIRST_EXIT = re.compile(r"Process name: (?:\[.*,)?(\d+)\]?\s+Exit code: +(\d+)")
_FIRST_OF_SRUN = re.compile(r"srun: error: \S+: tasks? (\d+)[\d,-]*: Exited with exit code (\d+)")
_FIRST_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on\s+signal (\d+)")
# What MPI prints in a process that it ends because a peer is gone. The starter may report that process before the
# peer, or instead of it: the peer's rank is unknown then.
_PEER_LOST = re.compile(r"\[(\d+)\]<stderr>: (?: +Peer host: +\S|.*An error occurred in Socket closed)")
_SAID = re.compile(r"^\[\d+\]<stderr>: ?(.*\w.*)", re.MULTILINE)
_MESSAGE = re.compile(r"\s*hvdtrain: (.*\w.*)")
# What ranks print of a loss that the job survives, and of what comes after it.
_SURVIVED = re.compile(r"the others go on without it|rank \d+ has joined|was killed and is back")

MAX_LINES, MAX_LINE_LENGTH = 12, 200  # shown of a rank that failed


def log_text(log: Path) -> str:
    """What was printed; nothing where that cannot be read."""
    with contextlib.suppress(OSError):
        return read_whole(log).decode(errors="replace")
    return ""


def log_lines(log: Path) -> list[tuple[int | None, str]]:
    """The lines of a job's log as (process that printed it, text); None where the starter printed it."""
    matches = [match for line in log_text(log).splitlines() if (match := _LINE.fullmatch(line))]
    return [(None if match[1] is None else int(match[1]), match[2]) for match in matches]


def first_failed(log: Path) -> tuple[int, int] | None:
    """The process that failed first, by the starter's number, and its exit code; None where the log does not say.

    The code of a process that a signal ended is 128 plus the signal's number, as in a shell.
    """
    text = log_text(log)
    if match := _FIRST_EXIT.search(text) or _FIRST_OF_SRUN.search(text):
        return int(match[1]), int(match[2])
    if match := _FIRST_SIGNAL.search(text):
        return int(match[1]), 128 + int(match[2])
    return None


def messages_of(log: Path, process: int | None = None) -> list[str]:
    """What a process, by the starter's number, said was wrong with it, as all of hvdtrain says it; or all processes."""
    said = [
        match[1].rstrip() for by, line in log_lines(log) if process in (None, by) and (match := _MESSAGE.match(line))
    ]
    return [message for message in said if not _SURVIVED.search(message)]


def failure_reason(log: Path, exit_code: int | None, rank_of: Callable[[int], int] | None = None) -> str:
    """Why a job failed, in one line, from what its ranks and their starter printed.

    Args:
        exit_code: the starter's; without it, the reason is empty where they have not said it.
        rank_of: the rank of a process that the starter numbers; without it, that number is named.
    """

    def name(process: int) -> str:
        return f"rank {rank_of(process)}" if rank_of else f"process {process}"

    lines = [(process, line.strip()) for process, line in log_lines(log) if re.search(r"\w", line)]
    messages, first = messages_of(log), first_failed(log)
    if first:
        process, code = first
        if messages_of(log, process):
            return messages_of(log, process)[0]
        printed = [line for by, line in lines if by == process]
        ending = f"{name(process)} {_describe_exit(code)}" + (f": {printed[-1]}" if printed else "")
        return f"{ending}; {messages[0]}" if messages else f"{ending} (see {log})"
    if messages:
        return messages[0]
    if match := _PEER_LOST.search(log_text(log)):
        return f"another rank is gone: {name(int(match[1]))} lost its connection (see {log})"
    if exit_code is None:
        return ""
    ended = f"exit code {exit_code}" if exit_code >= 0 else f"its starter {_describe_exit(128 - exit_code)}"
    # Of a rank, or else of the starter, which goes on to say what it could not clean up.
    said = _SAID.findall(log_text(log)) or [line for _, line in lines] or ["no output"]
    return f"{ended}: {said[-1]} (see {log})"


def _describe_exit(code: int) -> str:
    if code == 255:  # what ssh ends with in both cases
        return "was ended by a signal, or the ssh connection to its host broke"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def job_failure(folder: Path, log: Path, exit_code: int, rank_of: Callable[[int], int]) -> Failure:
    """The Failure to raise, with the exit code of the rank that failed first. Its last lines are printed, unless it has
    said itself what was wrong.

    Args:
        folder: the run folder.
        log: what the starter and the ranks printed.
        exit_code: the starter's, negative where a signal ended it.
        rank_of: the rank of a process that the starter numbers.
    """
    first = first_failed(log)
    if first and not messages_of(log, first[0]):
        file = folder / "logs" / f"rank.{rank_of(first[0])}.err"
        if lines := log_text(file).splitlines():  # nothing where the rank has not come so far as to open it
            click.echo(f"the last lines of rank {rank_of(first[0])}, in {file}:", err=True)
        for line in lines[-MAX_LINES:]:
            click.echo(f"    {line[:MAX_LINE_LENGTH]}", err=True)
    failure = Failure(f"the job failed: {failure_reason(log, exit_code, rank_of)}")
    failure.exit_code = first[1] if first else 128 - exit_code if exit_code < 0 else exit_code or 1
    return failure
