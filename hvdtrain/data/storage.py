"""The user's cache, folders that appear complete or not at all, and work on all cores."""

import ctypes
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import some_of
from hvdtrain.base.system.locks import locked_by, open_locked

WAVE = 128  # images for each core that are started together
# Images that a thread takes at once, at most: to hand over one takes longer than to read a small
# file.
CHUNK = 64

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], None]  # images that are done, images in all


def cache_root() -> Path:
    """Returns the folder for built-in data sets and downloads, which need not exist.

    The environment variable HVDTRAIN_CACHE moves it.
    """
    import platformdirs

    return Path(os.environ.get("HVDTRAIN_CACHE") or platformdirs.user_cache_dir("hvdtrain"))


@contextmanager
def locked(out: Path, wait: bool = True) -> Iterator[None]:
    """Locks a file or folder that this process is to make, for the block.

    The lock of a process that dies is released.

    Args:
        wait: Block while another process has the lock.

    Raises:
        UsageError: The lock file cannot be written or locked; without `wait`, another process has
            the lock.
    """
    path = out.with_name(f".{out.name}.hvdtrain-lock")
    try:
        file = open_locked(path, wait)
    except OSError as error:
        what = f"cannot write in '{path.parent}'" if error.filename else f"cannot lock '{path}'"
        remedy = ""
        if path.is_relative_to(cache_root()):
            remedy = ". It is in your cache, which HVDTRAIN_CACHE=FOLDER moves"
        raise UsageError(f"{what}: {error.strerror}{remedy}") from None
    with locked_by(file, path):
        yield


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to fill, which is renamed to `out` if the block raises no exception.

    The caller holds the lock on `out`. All files are on the disk before the folder is renamed, so
    that after a power cut it is complete or missing.
    """
    partial = out.with_name(f".{out.name}.hvdtrain-partial")
    replaced = out.with_name(f".{out.name}.hvdtrain-replaced")
    leftovers = [partial, replaced]
    # A process may have been killed between the two renames below.
    if replaced.exists() and not out.exists():
        replaced.rename(out)
    try:
        for leftover in leftovers:
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        yield partial
        _write_out(partial)
        if out.is_dir() and any(out.iterdir()):
            out.rename(replaced)
        try:
            partial.rename(out)
        except BaseException:
            # Another file is at `out` now, or the disk failed. Restore the folder of before.
            if replaced.exists() and not out.exists():
                replaced.rename(out)
            raise
    finally:
        for leftover in leftovers:
            shutil.rmtree(leftover, ignore_errors=True)


def check_replaceable(out: Path, contents: Set[str], is_made_here: bool, maker: str) -> bool:
    """Returns whether `out` has a command's earlier results; False if it is missing or empty.

    Args:
        out: The folder that a command is to write.
        contents: The names of all that the command puts into such a folder.
        is_made_here: Whether the files in `out` say that the command made them.
        maker: The command.

    Raises:
        UsageError: `out` has anything else, or cannot be replaced.
    """
    if not out.exists():
        return False
    if not out.is_dir():
        raise UsageError(f"'{out}' is a file: name a folder that does not exist yet")
    if out.is_mount() or out == Path.cwd():
        raise UsageError(f"'{out}' itself cannot be replaced: name a new folder inside it")
    names = set(os.listdir(out))
    if names and not is_made_here:
        raise UsageError(
            f"'{out}' is not empty and was not made by `{maker}`: name another folder, or remove it"
        )
    foreign = sorted(names - contents)
    if foreign:
        raise UsageError(
            f"'{out}' holds what `{maker}` has not put there ({some_of(foreign)}): "
            "name another folder"
        )
    return bool(names)


def fetch_whole(filesystem: Any, path: str, local: Path, most: int) -> None:
    """Copies a file of an fsspec file system to this host.

    Args:
        filesystem: The file system.
        path: The path in the file system.
        local: The path of the copy.
        most: Bytes that the file may have.

    Raises:
        ValueError: The file has more than `most` bytes. No more of them are read then.
    """
    from fsspec.callbacks import Callback

    def check(_: int | None, received: int, **__: Any) -> None:
        if received > most:
            raise ValueError(f"more than {most:,} bytes come")

    # A local file system does not call back.
    if getattr(filesystem, "local_file", False):
        check(None, os.path.getsize(path))
    filesystem.get_file(path, str(local), callback=Callback(hooks={"most": check}))


def on_all_cores(
    work: Callable[[T], R], items: Iterable[T], total: int = 0, progress: Progress | None = None
) -> Iterator[tuple[T, R]]:
    """Applies `work` to items in threads, and yields each item and its result, in order.

    At most WAVE items for each core are taken ahead of what has been yielded.

    Args:
        work: The function to apply.
        items: The items.
        total: The number of items, for `progress`.
        progress: Called after each item.
    """
    remaining = iter(items)
    cores = len(os.sched_getaffinity(0))
    done = 0

    def work_on(chunk: list[T]) -> list[R]:
        return [work(item) for item in chunk]

    with ThreadPoolExecutor(cores, thread_name_prefix="images") as pool:
        while wave := list(islice(remaining, WAVE * cores)):
            size = min(CHUNK, -(-len(wave) // cores))  # each core has some, even of a few items
            chunks = [wave[first : first + size] for first in range(0, len(wave), size)]
            results = chain.from_iterable(pool.map(work_on, chunks))
            for item, result in zip(wave, results, strict=True):
                done += 1
                if progress:
                    progress(done, total)
                yield item, result


def _write_out(folder: Path) -> None:
    """Blocks until all that was written to the folder's file system is on the disk.

    This is one call for any number of files.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(opened):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(opened)
