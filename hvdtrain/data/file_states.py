"""The state of files, which tells without reading them whether they are as they were."""

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

# A file that has changed within so many seconds may change again without another time, where a
# file system counts times in whole seconds.
SETTLED_S = 2.0


@dataclass(frozen=True)
class FileStates:
    """What tells whether files are as they were.

    Attributes:
        state: A hash of their names, inodes, sizes and times. Nobody can set the time of a file's
            last change (ctime), so that a stranger's folder has no other folder's state.
        bytes: The sum of their sizes.
        changed: When one of them has last changed, in seconds since 1970.
    """

    state: str
    bytes: int
    changed: float

    @property
    def are_settled(self) -> bool:
        """Whether a change from now on would give another state."""
        return self.changed < time.time() - SETTLED_S


def look(paths: Iterable[bytes]) -> FileStates:
    """Returns the state of files, in this order. Raises OSError if one of them is not there."""
    total = hashlib.sha256()
    size = 0
    changed = 0
    for path in paths:
        status = os.stat(path)
        times = (status.st_mtime_ns, status.st_ctime_ns)
        numbers = (status.st_dev, status.st_ino, status.st_size, *times)
        total.update(b"%s\0%d %d %d %d %d\0" % (path, *numbers))
        size += status.st_size
        changed = max(changed, *times)
    return FileStates(total.hexdigest(), size, changed / 1e9)
