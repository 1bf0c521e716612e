"""Files to which a process appends lines: on a full disk, and after a process that was killed."""

import errno
import os
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MOST_WAITING = 2**26  # bytes


class AppendedFile:
    """A file in which each line is at once. On a full disk lines wait in memory for room.

    Args:
        anew: whether to empty the file first.
    """

    def __init__(self, path: Path, anew: bool = False) -> None:
        self._file = path.open("wb" if anew else "ab", buffering=0)
        self._waiting = b""

    def write(self, text: str) -> None:
        """Appends the text.

        Raises:
            OSError: writing failed for another reason than a full disk, or too much text waits.
        """
        self._waiting += text.encode()
        try:
            self._flush()
        except OSError as error:
            if error.errno not in NO_ROOM or len(self._waiting) > MOST_WAITING:
                raise

    def close(self) -> None:
        """Closes the file.

        Raises:
            OSError: there is no room for the text that waits.
        """
        with self._file:
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            written = self._file.write(self._waiting)  # less than all if the disk becomes full
            self._waiting = self._waiting[written:]


def whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file to which a killed process has appended.

    An unfinished last line is cut off the file, so that others can append to it.
    """
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return whole.decode().splitlines()
