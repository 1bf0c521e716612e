"""A limit on waits that cannot be interrupted, such as joining Horovod in C++."""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import NoReturn

from hvdtrain.base.system.locks import unlock_all
from hvdtrain.base.system.terminal import tell


@contextlib.contextmanager
def or_exit(seconds: float, problem: str, see: str = " (see --timeout)") -> Iterator[None]:
    """Ends this process, with exit code 1 and a line on the terminal, if the block takes longer."""

    timer = threading.Timer(seconds, end_process, [f"{problem} within {seconds:g} s{see}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_process(problem: str) -> NoReturn:
    """Ends this process at once, with exit code 1 and a line on the terminal.

    Other threads are not waited for.
    """
    with contextlib.suppress(OSError):
        tell(problem)
    unlock_all()
    os._exit(1)
