"""Locks on files, which the system releases when a process ends, however it does: also where file systems have none.

Lustre without `-o flock`, and some NFS, refuse flock. There a file beside the locked one says who holds it, and has to
be removed by hand where that process was killed and filelock cannot tell or take it: on another host, say.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

REFUSED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
TRIES = 1000  # of making a lock file that others remove

_held: list[BaseFileLock] = []  # by this process


def lock(path: Path, wait: bool = False, replaces: bool = False) -> BaseFileLock:
    """Lock a file, which is made where it is not there, until `unlock` is called or this process ends.

    Args:
        wait: for whoever holds it.
        replaces: this file is about to take the place of another, which this process has locked.

    Raises:
        BlockingIOError: another holds it; it has the name of the file that says so, where flock is refused.
        OSError: the file cannot be locked.
    """
    held: BaseFileLock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        try:
            held.acquire(blocking=wait)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            if not replaces:
                marker = path.absolute().with_name(f".{path.name.lstrip('.')}.hvdtrain-held")
                held = SoftFileLock(marker, thread_local=False)
                held.acquire(blocking=wait)
    except Timeout:
        name = (held.lock_file,) if isinstance(held, SoftFileLock) else ()
        raise BlockingIOError(errno.EWOULDBLOCK, "another process holds it", *name) from None
    _held.append(held)
    return held


def unlock(held: BaseFileLock) -> None:
    _held.remove(held)
    held.release()


def unlock_all() -> None:
    """Remove what says that this process holds locks, before it ends on its own account: the system does the rest."""
    for held in _held:
        if isinstance(held, SoftFileLock):
            with suppress(OSError):
                held.release()


@contextmanager
def locked_by(held: BaseFileLock, path: Path) -> Iterator[None]:
    """In the block this process holds the file that open_locked gave it; then it is removed."""
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked: who waits for it makes the next one
        unlock(held)


def open_locked(path: Path) -> BaseFileLock:
    """Make a file that nothing is but a lock, in a folder that is made too, and lock it; wait for whoever holds it.

    Who held it before has removed it, and perhaps the folder: then it is made again.

    Raises:
        OSError: the file cannot be made, which has its name, or locked, which has none.
    """
    for _ in range(TRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return lock(path, wait=True)
        except FileNotFoundError:
            pass
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(path))
