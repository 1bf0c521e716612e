"""Locks on files, which the system releases when a process ends, however it does: also where file systems have none.

Lustre without `-o flock`, and some NFS, refuse flock. There a symbolic link beside the file says who holds it, and its
holder renews the link's time: one whose process has ended, or that is too old to be another host's that lives, counts
no more.
"""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from hvdtrain.world.host import boot_id
from hvdtrain.world.parent import is_alive, start_ticks

REFUSED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
BEAT_S = 10.0  # how often a holder renews its link
SILENT_S = 150.0  # after which a holder elsewhere is gone: NFS shows times up to a minute late, and clocks differ
RETRY_S = 0.05
TRIES = 1000  # of making a lock file that others remove

_held: set[Path] = set()  # links of this process
_guard = threading.Lock()


def lock(descriptor: int, path: Path, wait: bool = False, replaces: bool = False) -> None:
    """Lock an open file until it is closed, and `unlock` called, or this process ends.

    Args:
        path: of the file.
        wait: for whoever holds it.
        replaces: this file is about to take the place of the one at the path, which this process has locked.

    Raises:
        BlockingIOError: another holds it.
        OSError: the file cannot be locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        while not (replaces or _take(_link(path))):
            if not wait:
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK)) from None
            time.sleep(RETRY_S)


@contextmanager
def locked_by(file: int, path: Path) -> Iterator[None]:
    """In the block this process holds the file that open_locked gave it; then it is removed."""
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked: who waits for it makes the next one
        os.close(file)
        unlock(path)


def open_locked(path: Path) -> int:
    """Make a file that nothing is but a lock, in a folder that is made too, and lock it; wait for whoever holds it.

    Who held it before has removed it, and perhaps the folder, and a lock on a removed file excludes nobody: a third
    process would make the file anew and lock that. Then it is made again.

    Raises:
        OSError: the file cannot be made, which has its name, or locked, which has none.
    """
    for tries_left in reversed(range(TRIES)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        except FileNotFoundError:
            if not tries_left:
                raise
            continue
        try:
            lock(file, path, wait=True)
            if os.fstat(file).st_nlink:
                return file
            unlock(path)
        except FileNotFoundError:  # of the folder, where a link in it is the lock
            pass
        except OSError:
            os.close(file)
            raise
        os.close(file)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def unlock(path: Path) -> None:
    """Let go of the link, where there is one; closing the file does the rest."""
    link = _link(path)
    with _guard:
        if link in _held:
            _held.remove(link)
            link.unlink(missing_ok=True)


def unlock_all() -> None:
    """Let go of every link, before this process ends on its own account."""
    with _guard, suppress(OSError):
        while _held:
            _held.pop().unlink(missing_ok=True)


def _link(path: Path) -> Path:
    return path.absolute().with_name(f".{path.name.lstrip('.')}.hvdtrain-held")


def _take(link: Path) -> bool:
    with _guard:
        _remove_if_gone(link)
        try:
            os.symlink(_name(), link)
        except FileExistsError:
            return False
        _held.add(link)
        _beating(os.getpid())
        return True


def _name() -> str:
    """Who this process is: its process IDs' namespace, its ID, and when it began, since IDs are given again."""
    return f"{_place()} {os.getpid()} {start_ticks(os.getpid())}"


def _place() -> str:
    with suppress(OSError):
        return f"{boot_id()}.{os.stat('/proc/self/ns/pid').st_ino}"
    return boot_id()


def _remove_if_gone(link: Path) -> None:
    """Remove the link of a holder that is there no more, and no other: one may have taken it meanwhile."""
    with suppress(OSError, ValueError):
        holder, age = os.readlink(link), time.time() - link.lstat().st_mtime
        place, pid, began = holder.split(" ")
        if place == _place():
            with suppress(psutil.NoSuchProcess, OSError):
                if start_ticks(int(pid)) == began and is_alive(psutil.Process(int(pid))):
                    return
        elif age < SILENT_S:
            return
        aside = link.with_name(f"{link.name}.{os.getpid()}")
        link.rename(aside)
        if os.readlink(aside) == holder:
            aside.unlink()
        else:
            aside.rename(link)


@cache
def _beating(pid: int) -> None:
    """Renew the links of this process as long as it lives; a fork needs a thread of its own."""
    threading.Thread(target=_beat, daemon=True, name="locks").start()


def _beat() -> None:
    while True:
        time.sleep(BEAT_S)
        with _guard:
            for link in _held:
                with suppress(OSError):
                    os.utime(link, follow_symlinks=False)
