"""Files to which a process appends lines while it works: on a full disk, and after a process that was killed."""

import errno
import os
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MOST_WAITING = 2**26  # bytes


class AppendedFile:
    """A file whose lines are in it at once. What the disk has no room for waits here until it has some.

    Args:
        anew: empty the file first.
    """

    def __init__(self, path: Path, anew: bool = False) -> None:
        self._file = path.open("wb" if anew else "ab", buffering=0)
        self._waiting = b""

    def write(self, text: str) -> None:
        """Append it. OSError where that fails for another reason than a full disk, or too much waits."""
        self._waiting += text.encode()
        try:
            self._flush()
        except OSError as error:
            if error.errno not in NO_ROOM or len(self._waiting) > MOST_WAITING:
                raise

    def close(self) -> None:
        """OSError where there is no room for what waits."""
        with self._file:
            self._flush()

    def _flush(self) -> None:
        while self._waiting:  # a part of it may have had room
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def whole_lines(path: Path) -> list[str]:
    """The lines of a file to which a process has appended that was killed. What it had not written to its end is cut
    off: others append to it.
    """
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return whole.decode().splitlines()
