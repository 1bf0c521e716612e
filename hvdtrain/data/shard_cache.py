"""Whole shards on the disk of a host, downloaded once for all of its ranks."""

import os
import shutil
from pathlib import Path
from typing import Any

from hvdtrain.data.storage import fetch_whole, locked
from hvdtrain.system.appending import NO_ROOM

KEPT_FREE = 0.1  # of the disk that the cache is on: whole shards are kept while so much stays free


def read_kept(local: Path, filesystem: Any, path: str, shard_bytes: int, offset: int, size: int) -> bytes | None:
    """Bytes of a shard that is kept in the file `local`, and downloaded where it is missing; None where the disk has no
    room for it.
    """
    if not local.exists():
        with locked(local):
            disk = shutil.disk_usage(local.parent)
            if not local.exists() and disk.free - shard_bytes >= KEPT_FREE * disk.total:
                _download(filesystem, path, local, shard_bytes)
    try:
        with local.open("rb") as file:
            return os.pread(file.fileno(), size, offset)
    except FileNotFoundError:  # it has no room, or somebody has just emptied the cache
        return None


def _download(filesystem: Any, path: str, local: Path, shard_bytes: int) -> None:
    partial = local.with_name(f"{local.name}.partial")
    try:
        fetch_whole(filesystem, path, partial, shard_bytes)
        partial.rename(local)
    except OSError as error:
        if error.errno not in NO_ROOM:  # others have filled the disk meanwhile
            raise
    finally:
        partial.unlink(missing_ok=True)
