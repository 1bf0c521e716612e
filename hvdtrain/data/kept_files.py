"""Whole files on the disk of a host, downloaded once for all of its ranks."""

import shutil
from pathlib import Path
from typing import Any

from hvdtrain.data.storage import fetch_whole, locked
from hvdtrain.system.appending import NO_ROOM

KEPT_FREE = 0.1  # of the disk that the cache is on: whole files are kept while so much stays free


def kept(local: Path, filesystem: Any, path: str, size: int) -> Path | None:
    """The file `local`, of `size` bytes, which is downloaded where it is missing; None where the disk has no room."""
    if not local.exists():
        with locked(local):
            disk = shutil.disk_usage(local.parent)
            if not local.exists() and disk.free - size >= KEPT_FREE * disk.total:
                _download(filesystem, path, local, size)
    return local if local.exists() else None


def _download(filesystem: Any, path: str, local: Path, size: int) -> None:
    partial = local.with_name(f"{local.name}.partial")
    try:
        fetch_whole(filesystem, path, partial, size)
        if (come := partial.stat().st_size) != size:
            raise ValueError(f"{come:,} bytes came and not {size:,}")
        partial.rename(local)
    except OSError as error:
        if error.errno not in NO_ROOM:  # others have filled the disk meanwhile
            raise
    finally:
        partial.unlink(missing_ok=True)
