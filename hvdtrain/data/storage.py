"""The user's cache, and folders that only one process at a time makes and that appear complete or not at all."""

import ctypes
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import UsageError
from hvdtrain.formatting import some_of
from hvdtrain.system.locks import locked_by, open_locked

WAVE = 128  # images for each core that are taken before the next are
PART = 64  # that a thread takes at once, at most: to hand over one takes longer than to read a small file

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], None]  # images that are done, images in all


def cache_root() -> Path:
    """Where built-in data sets and downloads are kept; it need not exist. HVDTRAIN_CACHE moves it."""
    import platformdirs

    return Path(os.environ.get("HVDTRAIN_CACHE") or platformdirs.user_cache_dir("hvdtrain"))


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes from making the same file or folder. The lock of a process that dies is released."""
    path = out.with_name(f".{out.name}.hvdtrain-lock")
    try:
        file = open_locked(path)
    except OSError as error:
        what = f"cannot write in '{path.parent}'" if error.filename else f"cannot lock '{path}'"
        raise UsageError(f"{what}: {error.strerror}") from None
    with locked_by(file, path):
        yield


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the block ends without an exception. Needs the lock on `out`.

    All that is in it is on the disk before it has its name: after a power cut it is whole, or missing.
    """
    partial, replaced = (out.with_name(f".{out.name}.hvdtrain-{what}") for what in ("partial", "replaced"))
    leftovers = [partial, replaced]
    try:
        for leftover in leftovers:  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        yield partial
        _write_out(partial)
        if out.is_dir() and any(out.iterdir()):
            out.rename(replaced)
        try:
            partial.rename(out)
        except BaseException:  # something has taken its place, or the disk failed: what was replaced comes back
            if replaced.exists() and not out.exists():
                replaced.rename(out)
            raise
    finally:
        for leftover in leftovers:
            shutil.rmtree(leftover, ignore_errors=True)


def check_replaceable(out: Path, contents: Set[str], is_made_here: bool, maker: str) -> bool:
    """Whether a command's earlier results are at `out`; False where nothing is, or an empty folder.

    Args:
        contents: names of all that the command puts into such a folder.
        is_made_here: whether what is in it says that the command made it.
        maker: the command.

    Raises:
        UsageError: anything else is there, or the folder itself cannot be replaced.
    """
    if not out.exists():
        return False
    if not out.is_dir():
        raise UsageError(f"'{out}' is a file: name a folder that does not exist yet")
    if out.is_mount() or out == Path.cwd():
        raise UsageError(f"'{out}' itself cannot be replaced: name a new folder inside it")
    names = set(os.listdir(out))
    if names and not is_made_here:
        raise UsageError(f"'{out}' is not empty and was not made by `{maker}`: name another folder, or remove it")
    if foreign := sorted(names - contents):
        raise UsageError(f"'{out}' holds what `{maker}` has not put there ({some_of(foreign)}): name another folder")
    return bool(names)


def fetch_whole(filesystem: Any, path: str, local: Path, most: int) -> None:
    """Copy a file of one of fsspec's file systems. ValueError as soon as more than `most` bytes come."""
    from fsspec.callbacks import Callback

    def check(_: int | None, come: int, **__: Any) -> None:
        if come > most:
            raise ValueError(f"more than {most:,} bytes come")

    if getattr(filesystem, "local_file", False):  # which calls nothing back
        check(None, os.path.getsize(path))
    filesystem.get_file(path, str(local), callback=Callback(hooks={"most": check}))


def on_all_cores(
    work: Callable[[T], R], items: Iterable[T], total: int = 0, progress: Progress | None = None
) -> Iterator[tuple[T, R]]:
    """Each item with what `work` makes of it, in order. Items are taken no faster than they are worked on."""
    remaining, cores, done = iter(items), len(os.sched_getaffinity(0)), 0
    with ThreadPoolExecutor(cores, thread_name_prefix="images") as pool:
        while wave := list(islice(remaining, WAVE * cores)):
            size = min(PART, -(-len(wave) // cores))  # of few, each core has some
            parts = [wave[first : first + size] for first in range(0, len(wave), size)]
            results = chain.from_iterable(pool.map(lambda part: [work(item) for item in part], parts))
            for item, result in zip(wave, results, strict=True):
                done += 1
                if progress:
                    progress(done, total)
                yield item, result


def _write_out(folder: Path) -> None:
    """Have the disk hold what was written in the folder's file system: one call for any number of files."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(opened):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(opened)
