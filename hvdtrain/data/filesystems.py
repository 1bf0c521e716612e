"""Where Parquet files lie: in a folder, or at any URL that fsspec supports."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data.names import is_passed_over

# fsspec's prefix for URLs whose files are cached. data.kept_files caches them in place of fsspec,
# whose cache is not safe with threads.
CACHED = "simplecache::"
DEPTH = 2  # levels in which files are looked for: the folder, and the folders in it
SUFFIX = ".parquet"


def open_filesystem(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system for a URL or a path, and the path in that file system.

    Raises:
        UsageError: fsspec knows no such file system, or a package for it is missing.
    """
    import fsspec

    if "://" not in url and not url.startswith(CACHED):  # a path may have `::`, which chains URLs
        return fsspec.filesystem("file"), os.path.abspath(url)
    with errors_as_usage(url):
        filesystem, root = fsspec.core.url_to_fs(url.removeprefix(CACHED))
        return filesystem, root.rstrip("/")


def parquet_files(filesystem: Any, root: str) -> list[str]:
    """Returns the paths of all Parquet files up to DEPTH levels deep, sorted.

    Hidden ones are left out, and those in folders that systems leave (names.is_passed_over).
    """
    found = filesystem.find(root, maxdepth=DEPTH)
    files = [path for path in found if path.endswith(SUFFIX) and path != root]
    return sorted(path for path in files if not _is_hidden(path.removeprefix(root)))


def _is_hidden(path: str) -> bool:
    return any(map(is_passed_over, path.split("/")))


def reason_of(error: Exception) -> str:
    """Returns one line about an error that a file system or pyarrow has raised."""
    if isinstance(error, MemoryError):
        return "it unpacks to more memory than reading may take"
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def errors_as_usage(url: str) -> Iterator[None]:
    """Turns any error of a file system or of pyarrow into a UsageError of one line."""
    try:
        yield
    except (UsageError, Failure):
        raise
    except Exception as error:
        remedy = ", with `uv pip install`" if isinstance(error, ImportError) else ""
        reason = f"{reason_of(error)}{remedy}"
        raise UsageError(f"{url} cannot be used: {reason}") from None
