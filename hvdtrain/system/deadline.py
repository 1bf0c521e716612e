"""A limit on waits that have none of their own and cannot be interrupted: joining Horovod, in C++."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from hvdtrain.system import terminal


@contextlib.contextmanager
def or_exit(seconds: float, problem: str, see: str = " (see --timeout)") -> Iterator[None]:
    """End this process, with exit code 1 and one line on the terminal, unless the block is done by then."""

    def end() -> None:
        out = terminal.current.err if terminal.current else sys.stderr
        print(f"hvdtrain: {problem} within {seconds:g} s{see}", file=out, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
