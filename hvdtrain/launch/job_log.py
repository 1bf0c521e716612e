"""Reads the log of a job, which has what its starter and its ranks printed: lines by rank, and why the job failed."""

import contextlib
import re
import signal
from collections.abc import Callable
from pathlib import Path

from hvdtrain.config.untrusted import read_whole

_LINE = re.compile(r"(?:\[(\d+)\]<std(?:out|err)>: ?)?(.*)")  # starters put `[RANK]<stdout>: ` before a rank's lines
# What mpirun and horovodrun print about the first process that fails: its exit code, or (mpirun) a signal.
_FIRST_EXIT = re.compile(r"Process name: (?:\[.*,)?(\d+)\]?\s+Exit code: +(\d+)")
_FIRST_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on\s+signal (\d+)")
# What MPI prints in a process that it ends because a peer is gone. The starter may report that process before the
# peer, or instead of it: the peer's rank is unknown then.
_PEER_LOST = re.compile(r"\[(\d+)\]<stderr>: (?: +Peer host: +\S|.*An error occurred in Socket closed)")
_SAID = re.compile(r"^\[\d+\]<stderr>: ?(.*\w.*)", re.MULTILINE)
_MESSAGE = re.compile(r"\s*hvdtrain: (.*\w.*)")
# What ranks print of a loss that the job survives, and of what comes after it.
_SURVIVED = re.compile(r"the others go on without it|rank \d+ has joined|was killed and is back")


def _text(log: Path) -> str:
    return "\n".join(read_whole(log).decode(errors="replace").splitlines())


def log_lines(log: Path) -> list[tuple[int | None, str]]:
    """The lines of a job's log as (process that printed it, text); None where the starter printed it."""
    lines = _text(log).splitlines()
    matches = [match for line in lines if (match := _LINE.fullmatch(line))]
    return [(None if match[1] is None else int(match[1]), match[2]) for match in matches]


def first_failed(log: Path) -> tuple[int, int] | None:
    """The process that failed first, by the starter's number, and its exit code; None where the log does not say.

    The code of a process that a signal ended is 128 plus the signal's number, as in a shell.
    """
    text = _text(log)
    if match := _FIRST_EXIT.search(text):
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
    messages = _messages(lines)
    first = first_failed(log)
    if first is None:
        if messages:
            return messages[0][1]
        text = _text(log)
        if match := _PEER_LOST.search(text):
            return (
                f"a rank on {match[2]} is gone: {_process_name(int(match[1]), rank_of)} lost its connection (see {log})"
            )
        if match := _SOCKET_CLOSED.search(text):
            return f"another rank is gone: {_process_name(int(match[1]), rank_of)} lost its connection (see {log})"
        if exit_code is None:
            return ""
        ended = f"exit code {exit_code}" if exit_code >= 0 else f"its starter {_describe_exit(128 - exit_code)}"
        # Of a rank, or else of the starter, which goes on to say what it could not clean up.
        said = _SAID.findall(text) or [line for _, line in lines] or ["no output"]
        return f"{ended}: {said[-1]} (see {log})"
    failed, failed_code = first
    if own_messages := messages_of(log, failed):
        return own_messages[0]
    own_lines = [line for process, line in lines if process == failed]
    ending = f"{_process_name(failed, rank_of)} {_describe_exit(failed_code)}"
    ending += f": {own_lines[-1]}" if own_lines else ""
    return f"{ending}; {messages[0][1]}" if messages else f"{ending} (see {log})"


def _messages(lines: list[tuple[int | None, str]]) -> list[tuple[int | None, str]]:
    """Those lines that say what is wrong; what the job survived is no reason, unless there is no other."""
    own = [(process, line.strip().removeprefix("hvdtrain: ")) for process, line in lines if _MESSAGE.match(line)]
    return sorted(own, key=lambda message: bool(_SURVIVED.search(message[1])))


def _process_name(process: int, rank_of: Callable[[int], int] | None) -> str:
    return f"rank {rank_of(process)}" if rank_of else f"process {process}"


def _describe_exit(code: int) -> str:
    if code == 255:  # what ssh ends with in both cases
        return "was ended by a signal, or the ssh connection to its host broke"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"
