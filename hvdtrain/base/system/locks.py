"""Locks on files, which the system releases when a process ends.

Lustre without `-o flock`, and some NFS, refuse flock. There a marker file beside the locked file
says who holds it. The marker has to be removed by hand if that process was killed and filelock
cannot tell, for example on another host.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from hvdtrain.base.errors import Failure

LEAST_FILELOCK = (4, 2, 1)  # older versions empty the file that they lock
REFUSED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
TRIES = 1000  # attempts to make a lock file that others remove

_held: list[BaseFileLock] = []  # the locks of this process


def lock(path: Path, wait: bool = False, replaces: bool = False) -> BaseFileLock:
    """Locks a file until `unlock` is called or this process ends. Creates the file if needed.

    Args:
        wait: block until the lock is free.
        replaces: the file is about to replace another, which this process has locked.

    Raises:
        BlockingIOError: another process holds the lock. The error names the marker file, if flock
            is refused.
        OSError: the file cannot be locked.
        Failure: this version of filelock would empty the file.
    """
    check_filelock()
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


def check_filelock() -> None:
    """Checks that this version of filelock leaves what it locks as it is.

    Raises:
        Failure: it would empty the file.
    """
    version = filelock.__version__
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < LEAST_FILELOCK:
        least = ".".join(map(str, LEAST_FILELOCK))
        raise Failure(
            f"filelock {version} would empty the files that it locks: "
            f"`pip install 'filelock>={least}'`"
        )


def unlock(held: BaseFileLock) -> None:
    """Releases a lock."""
    _held.remove(held)
    held.release()


def unlock_all() -> None:
    """Removes the marker files of this process before it ends; the system releases other locks."""
    for held in _held:
        if isinstance(held, SoftFileLock):
            with suppress(OSError):
                held.release()


@contextmanager
def locked_by(held: BaseFileLock, path: Path) -> Iterator[None]:
    """Holds a lock of open_locked in the block, and removes its file afterwards."""
    try:
        yield
    finally:
        # Removed while it is locked: a process that waits for it creates the next one.
        path.unlink(missing_ok=True)
        unlock(held)


def open_locked(path: Path, wait: bool = True) -> BaseFileLock:
    """Creates a lock file and its folder and locks it.

    The process that holds it removes the file, and perhaps the folder. Then they are created again.

    Args:
        wait: block while another process holds it.

    Raises:
        OSError: the file cannot be created (the error has its name), or locked (it has none).
    """
    for _ in range(TRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return lock(path, wait)
        except FileNotFoundError:
            pass
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(path))
