"""SIGTERM: a request to save and leave, which the training loop looks at between steps.

SIGUSR1 asks for the same: mpirun passes it on to its ranks, while it kills them half a second after a SIGTERM.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

EXIT_CODE = 143  # 128 + SIGTERM, as a shell would have it
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_terminated = False


class Terminated(SystemExit):
    """Training was ended by SIGTERM, and all is saved."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


def terminated() -> bool:
    """Whether this process was asked to leave."""
    return _terminated


@contextlib.contextmanager
def sigterm_waits() -> Iterator[None]:
    """Let SIGTERM only be noted; a second one ends this process at once."""
    global _terminated

    def note(*_: object) -> None:
        global _terminated
        if _terminated:
            os._exit(EXIT_CODE)
        _terminated = True

    _terminated = False
    with _answered(note):
        yield


@contextlib.contextmanager
def sigterm_ends() -> Iterator[None]:
    """Where sigterm_waits, but there is nothing yet to save, and it would wait for long: end this process at once."""
    with _answered(lambda *_: os._exit(EXIT_CODE)):
        yield


@contextlib.contextmanager
def _answered(handler: Callable[..., None]) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in SIGNALS]
    try:
        yield
    finally:
        for number, former in zip(SIGNALS, before, strict=True):
            signal.signal(number, former)
