"""The output of a rank: to the user's terminal, and into the rank's logs."""

import errno
import faulthandler
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hvdtrain.base.formatting import set_encoding, shown
from hvdtrain.base.system.appending import NO_ROOM


@dataclass(frozen=True)
class Terminal:
    """The user's terminal, apart from the logs."""

    out: TextIO
    err: TextIO


class _Screen(io.FileIO):
    """A stream that loses writes, without an error, on a closed terminal or a full disk."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (errno.EIO, *NO_ROOM):
                raise
            return memoryview(content).nbytes


current: Terminal | None = None  # set by open_logs


def open_logs(folder: Path, rank: int) -> Terminal:
    """Redirects the output of this process, also of C libraries, to logs/rank.{r}.{out,err}.

    Returns:
        The terminal to which the process printed before.
    """
    global current
    current = Terminal(_screen(1), _screen(2))
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for shown_stream, suffix in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream = getattr(shown_stream, "stream", shown_stream)
        stream.flush()
        set_encoding(stream, "utf-8")  # as all files have, whatever the terminal has
        log = os.open(logs / f"rank.{rank}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, stream.fileno())
        os.close(log)
    faulthandler.enable()
    return current


def _screen(descriptor: int) -> TextIO:
    screen = io.BufferedWriter(_Screen(os.dup(descriptor), "w"))
    encoding = sys.stdout.encoding
    return shown(io.TextIOWrapper(screen, encoding=encoding, line_buffering=True))


def tell(line: str) -> None:
    """Prints a line on the user's terminal, whichever rank this is.

    It is one write, also where PYTHONUNBUFFERED is set: several ranks have one terminal, and another
    one's line might come between this one and its end.
    """
    terminal = current.err if current else sys.stderr
    terminal.write(f"hvdtrain: {line}\n")
    terminal.flush()


def end_at_once() -> NoReturn:
    """Ends a rank after flushing its output, without finalising Python.

    Finalising takes long with torch loaded. After rpc was used it may also abort the process: the
    ends of other ranks reach threads of rpc that outlive its shutdown, and a thread that calls into
    Python meanwhile is ended within C++.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
