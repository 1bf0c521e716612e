"""SIGTERM: a request to save and leave, which the training loop looks at between steps.

SIGUSR1 and SIGUSR2 ask for the same: mpirun passes them on to its ranks, while it kills them half a second after a
SIGTERM, and Grid Engine sends them before it suspends or kills. Where a starter passes nothing on, a file beside the
run folder asks the first worker, and all workers do what one is asked.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

EXIT_CODE = 143  # 128 + SIGTERM, as a shell would have it
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LOOK_EVERY_S = 0.5  # for the file
_terminated = False
_file: Path | None = None
_looked_at = 0.0


class Terminated(SystemExit):
    """Training was ended by SIGTERM, and all is saved."""

    code = EXIT_CODE


def termination_requested() -> bool:
    """Whether this process was asked to leave."""
    global _terminated, _looked_at
    if not _terminated and _file and time.monotonic() - _looked_at > LOOK_EVERY_S:
        _looked_at = time.monotonic()
        _terminated = _file.exists()
    return _terminated


def all_are_to_leave() -> bool:
    """Whether the file asks for it, which is meant for the whole job: a signal may be meant for this process alone."""
    return termination_requested() and _file is not None and _file.exists()


@contextlib.contextmanager
def deferred_sigterm(file: Path | None = None) -> Iterator[None]:
    """Let SIGTERM only be remembered, for termination_requested; a second one ends this process at once.

    Args:
        file: counts as a SIGTERM when it is there.
    """
    global _terminated, _file

    def note(*_: object) -> None:
        global _terminated
        if _terminated:
            os._exit(EXIT_CODE)
        _terminated = True

    _terminated, _file = False, file
    with handled_by(note, *SIGNALS):
        yield


@contextlib.contextmanager
def immediate_sigterm() -> Iterator[None]:
    """Within deferred_sigterm, where there is nothing to save yet: SIGTERM ends this process at once."""
    with handled_by(lambda *_: os._exit(EXIT_CODE), *SIGNALS):
        yield


@contextlib.contextmanager
def handled_by(handler: Callable[..., None], *signals: signal.Signals) -> Iterator[None]:
    """In the block these signals have another handler. Not in other threads than the main one, which have none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, handler) for number in signals]
    try:
        yield
    finally:
        for number, former in zip(signals, before, strict=True):
            signal.signal(number, former)
