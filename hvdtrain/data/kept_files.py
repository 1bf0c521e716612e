"""Cache of whole files on a host's disk, which are downloaded once for all ranks of the host."""

import shutil
from pathlib import Path
from typing import Any

from hvdtrain.base.system.appending import NO_ROOM
from hvdtrain.data.storage import fetch_whole, locked

KEPT_FREE = 0.1  # share of the cache's disk that stays free


def kept(local: Path, filesystem: Any, path: str, size: int) -> Path | None:
    """Returns `local`, after downloading it if it is missing; None if the disk has no room.

    Args:
        local: Where the file is in the cache.
        filesystem: The fsspec file system to download from.
        path: The path in that file system.
        size: Bytes of the file.
    """
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
        received = partial.stat().st_size
        if received != size:
            raise ValueError(f"{received:,} bytes came and not {size:,}")
        partial.rename(local)
    except OSError as error:
        # Other programs may have filled the disk meanwhile: then the file is not kept.
        if error.errno not in NO_ROOM:
            raise
    finally:
        partial.unlink(missing_ok=True)
