"""What a rank prints: to the user's terminal, and into logs of its own."""

import errno
import faulthandler
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hvdtrain.formatting import shown
from hvdtrain.system.appending import NO_ROOM


@dataclass(frozen=True)
class Terminal:
    """What the user sees, kept apart from the logs."""

    out: TextIO
    err: TextIO


class _Screen(io.FileIO):
    """A rank goes on where what it prints goes nowhere: to a terminal that is closed, or to a file on a full disk."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.EIO, *NO_ROOM):
                raise
            return memoryview(content).nbytes


current: Terminal | None = None  # since open_logs


def open_logs(folder: Path, rank: int) -> Terminal:
    """Send all that this process prints, C libraries included, to logs/rank.{r}.{out,err}; return the terminal."""
    global current
    out, err = (io.TextIOWrapper(io.BufferedWriter(_Screen(os.dup(fd), "w")), line_buffering=True) for fd in (1, 2))
    current = Terminal(shown(out), shown(err))
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for stream, suffix in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        log = os.open(logs / f"rank.{rank}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, stream.fileno())
        os.close(log)
    faulthandler.enable()
    return current


def end_at_once() -> NoReturn:
    """End a rank with all that it printed, and without Python's own end, which takes torch longer than many a test.

    And where rpc was used, other ranks' ends reach threads of rpc's that outlive its shutdown. One that calls into
    Python while Python is ending is ended inside of C++, which aborts the process: about once in a hundred jobs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
