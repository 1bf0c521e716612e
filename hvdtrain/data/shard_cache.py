"""Whole shards on the disk of a host, downloaded once for all of its ranks."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.data.storage import fetch_whole, locked
from hvdtrain.system.appending import NO_ROOM

KEPT_FREE = 0.1  # of the disk that the cache is on: whole shards are kept while so much stays free


@dataclass(frozen=True)
class ShardCache:
    """The shards of one packing of a data set.

    Attributes:
        folder: where they are.
    """

    folder: Path

    def read(self, filesystem: Any, shard: str, shard_bytes: int, offset: int, size: int) -> bytes | None:
        """Bytes of a shard, which is downloaded where it is missing; None where the disk has no room for it."""
        self._download(filesystem, shard, shard_bytes)
        try:
            with self.local(shard).open("rb") as file:
                return os.pread(file.fileno(), size, offset)
        except FileNotFoundError:  # it has no room, or somebody has just emptied the cache
            return None

    def forget(self, shard: str) -> None:
        """Have a shard downloaded again: it is damaged or outdated."""
        self.local(shard).unlink(missing_ok=True)

    def local(self, shard: str) -> Path:
        """Where a shard is kept."""
        return self.folder / Path(shard).name

    def _download(self, filesystem: Any, shard: str, shard_bytes: int) -> None:
        local = self.local(shard)
        if local.exists():
            return
        with locked(local):
            disk = shutil.disk_usage(self.folder)
            if local.exists() or disk.free - shard_bytes < KEPT_FREE * disk.total:
                return
            partial = local.with_name(f"{local.name}.partial")
            try:
                fetch_whole(filesystem, shard, partial, shard_bytes)
                partial.rename(local)
            except OSError as error:
                if error.errno not in NO_ROOM:  # others have filled the disk meanwhile
                    raise
            finally:
                partial.unlink(missing_ok=True)
