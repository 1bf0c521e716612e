"""Requests to save and leave, which the training loop checks between steps.

SIGTERM is such a request, and so are SIGUSR1 and SIGUSR2. mpirun passes these two on to its ranks,
while it kills them half a second after a SIGTERM; Grid Engine sends them before it suspends or
kills. If a starter passes no signals on, a file beside the run folder asks the first worker. All
workers leave when one is asked to. A server that is asked tells the workers.

SIGTERM also ends the commands that start jobs, and so does SIGHUP: see ending_signals. SIGHUP ends a
rank at once, without a snapshot.
"""

import contextlib
import functools
import math
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXIT_CODE = 143  # 128 + SIGTERM, as a shell would have it
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LOOK_EVERY_S = 0.5  # seconds between looks for the file
UNWINDS_S = 5.0  # how long a SIGTERM that follows another is ignored
_terminated = False
_server_is_asked = False
_file: Path | None = None
_looked_at = 0.0


class Terminated(SystemExit):
    """The end of training by SIGTERM, after all is saved."""

    code = EXIT_CODE


def termination_requested() -> bool:
    """Returns whether this process was asked to leave."""
    global _terminated, _looked_at
    if not _terminated and _file and time.monotonic() - _looked_at > LOOK_EVERY_S:
        _looked_at = time.monotonic()
        _terminated = _file.exists()
    return _terminated or _server_is_asked


def all_are_to_leave() -> bool:
    """Returns whether the whole job is asked to leave: by the file, or by a signal to a server.

    A signal to a worker may be for that worker alone.
    """
    if _server_is_asked:
        return True
    return termination_requested() and _file is not None and _file.exists()


def note_servers_request() -> None:
    """Notes that a server was asked to leave. It does not count as a signal to this process."""
    global _server_is_asked
    _server_is_asked = True


@contextlib.contextmanager
def deferred_sigterm(file: Path | None = None) -> Iterator[None]:
    """Defers SIGTERM in the block: termination_requested tells of it. A second ends the process.

    Args:
        file: counts as a SIGTERM once it exists.
    """
    global _terminated, _server_is_asked, _file

    def note(*_: object) -> None:
        global _terminated
        if _terminated:
            os._exit(EXIT_CODE)
        _terminated = True

    _terminated = False
    _server_is_asked = False
    _file = file
    with handled_by(note, *SIGNALS):
        yield


@contextlib.contextmanager
def immediate_sigterm() -> Iterator[None]:
    """Lets SIGTERM end this process at once in the block, where nothing is to be saved yet.

    A SIGTERM that deferred_sigterm has remembered ends it too.
    """
    with handled_by(lambda *_: os._exit(EXIT_CODE), *SIGNALS):
        if _terminated:
            os._exit(EXIT_CODE)
        yield


def ending_signals() -> list[signal.Signals]:
    """Returns the signals that end a command: SIGTERM, and SIGHUP, which a closed terminal sends.

    SIGHUP is left out where it is ignored, as under nohup.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return [signal.SIGTERM]
    return [signal.SIGTERM, signal.SIGHUP]


def _leave_terminal() -> None:
    """Sends what this process prints from now on to /dev/null.

    After SIGHUP its terminal is closed, and each print would fail.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        # A closed terminal is still a device, though no terminal any more.
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def signals_unwind() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which SIGTERM raises SystemExit(143), and SIGHUP SystemExit(129).

    Then it ends a running job in order, as Ctrl-C does, and temporary folders are removed.
    """

    raised_at = -math.inf

    def unwind(number: int, _: object) -> None:
        nonlocal raised_at
        now = time.monotonic()
        # A second SIGTERM does not break off what the first began. But Python ignores what is
        # raised at the moment of a fork: then a later one begins it.
        if now - raised_at > UNWINDS_S:
            raised_at = now
            raise SystemExit(128 + number)

    return handled_by(unwind, *ending_signals())


def ended_by_signals(command: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a command run in signals_unwind."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        with signals_unwind():
            return command(*arguments, **options)

    return run


@contextlib.contextmanager
def handled_by(handler: Callable[..., None], *signals: signal.Signals) -> Iterator[None]:
    """Sets another handler for these signals in the block. On SIGHUP it finds the terminal left.

    It does nothing in threads other than the main one, which handle no signals.
    """

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        handler(number, frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, handle) for number in signals]
    try:
        yield
    finally:
        for number, former in zip(signals, before, strict=True):
            signal.signal(number, former)
