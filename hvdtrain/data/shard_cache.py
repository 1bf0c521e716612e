"""Whole shards on the disk of a host, downloaded once for all of its ranks."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.data.sampling import SPREAD
from hvdtrain.data.storage import fetch_whole, locked
from hvdtrain.system.appending import NO_ROOM

KEPT_FREE = 0.1  # of the disk that the cache is on: whole shards are kept while so much stays free


@dataclass(frozen=True)
class ShardCache:
    """The shards of one packing of a data set.

    Attributes:
        folder: where they are. Beside it are those of other data sets.
        in_use: so many shards are read from at a time, in turns: others make room for the next one. 0: all are, as in
            an epoch that is shuffled as a whole, and none of them is worth another.
    """

    folder: Path
    in_use: int = 0

    def read(self, filesystem: Any, shard: str, shard_bytes: int, offset: int, size: int) -> bytes | None:
        """Bytes of a shard, which is downloaded where it is not there yet; None where the disk has no room for it."""
        for _ in range(2):  # again where another rank or job has just made room
            with contextlib.suppress(FileNotFoundError), self._download(filesystem, shard, shard_bytes).open("rb") as f:
                if self.in_use:
                    os.utime(f.fileno())  # used now: those that were used before it go first
                return os.pread(f.fileno(), size, offset)
        return None

    def has(self, shard: str) -> bool:
        return self._local(shard).exists()

    def forget(self, shard: str) -> None:
        """Have a shard downloaded again: it is damaged or outdated."""
        self._local(shard).unlink(missing_ok=True)

    def _local(self, shard: str) -> Path:
        return self.folder / Path(shard).name

    def _download(self, filesystem: Any, shard: str, shard_bytes: int) -> Path:
        """Where the shard is, or would be if the disk had room for it."""
        local = self._local(shard)
        if not local.exists():
            with locked(local):
                if not local.exists() and self._make_room(shard_bytes):
                    partial = local.with_name(f"{local.name}.partial")
                    try:
                        fetch_whole(filesystem, shard, partial, shard_bytes)
                        partial.rename(local)
                    except OSError as error:
                        if error.errno not in NO_ROOM:  # others have filled the room that there was
                            raise
                    finally:
                        partial.unlink(missing_ok=True)
        return local

    def _make_room(self, size: int) -> bool:
        """Whether the disk stays KEPT_FREE free when so many bytes come; before it would not, shards are removed."""
        disk = shutil.disk_usage(self.folder)
        missing = size + KEPT_FREE * disk.total - disk.free
        removable = {shard: _stat(shard).st_size for shard in (*self._of_others(), *self._own())} if missing > 0 else {}
        if missing > sum(removable.values()):  # none has to go then
            return False
        for shard, freed in removable.items():
            if missing > 0:
                shard.unlink(missing_ok=True)
                missing -= freed
        return True

    def _of_others(self) -> Iterator[Path]:
        """Shards of other data sets, of those first that were used least recently."""
        others = [other for other in self.folder.parent.iterdir() if other.is_dir() and other != self.folder]
        others.sort(key=lambda other: _stat(other).st_mtime)
        return (shard for other in others for shard in other.glob("*.tar"))

    def _own(self) -> Iterator[Path]:
        """Shards of this data set that are not in use, the least recently used first."""
        if self.in_use:
            yield from sorted(self.folder.glob("*.tar"), key=lambda own: _stat(own).st_mtime)[: -self.in_use]


def shards_in_use(shuffle_block: int, images_per_shard: int, validation_shards: int) -> int:
    """How many shards are read from in turns where an epoch is shuffled in blocks of so many images, those for
    validation included, whose images come in the folder's order; 0: nobody knows.
    """
    if not shuffle_block or images_per_shard < 1:
        return 0
    # A block may begin within a shard.
    return (SPREAD + 1) * (-(-shuffle_block // images_per_shard) + 1) + validation_shards


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:  # another rank has just removed it
        return os.stat_result([0] * 10)
