"""Writing files as a whole or not at all: until the new file is complete, the old one stays."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WRITTEN_THROUGH = ("/dev/std", "/dev/fd/", "/proc/")  # names of files that are open already


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yields a temporary file beside `path`, which replaces `path` when the block ends.

    If the block raises, the temporary file is removed, and `path` stays as it was. A device or a
    pipe is yielded itself.

    Args:
        mode: the permissions of a new file, before the process's umask.

    Raises:
        OSError: the folder cannot be written in.
    """
    if _is_written_in_place(path):
        yield path
        return
    if path.exists() and not path.is_symlink():
        mode &= path.stat().st_mode
    # The suffix stays, since some programs tell a file's format by it.
    part = path.with_name(f".part-{path.name}")
    part.unlink(missing_ok=True)  # a killed process left it, or a stranger made a link
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _is_written_in_place(path: Path) -> bool:
    is_open = str(path.absolute()).startswith(_WRITTEN_THROUGH)
    return is_open or (path.exists() and not path.is_file())


def check_folder(folder: Path) -> None:
    """Checks that files can be made in a folder.

    Several processes may ask this at once, and any of them may be killed meanwhile. So nothing is
    created that has a name.

    Raises:
        OSError: they cannot.
    """
    with tempfile.TemporaryFile(dir=folder):
        pass


def check_replacing(path: Path) -> None:
    """Checks that `replacing` can begin.

    Raises:
        OSError: the folder cannot be written in.
    """
    if not _is_written_in_place(path):
        check_folder(path.absolute().parent)


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Writes a file as a whole; see `replacing`.

    Raises:
        OSError: writing failed. The file is as it was before.
    """
    with replacing(path, mode) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
