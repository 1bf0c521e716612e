"""The `dataset_hash` of a manifest, which tells whether two runs had the same images.

Of a large data set only a sample is read. datasets/README.md describes the hash.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import convert

from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.data import image
from hvdtrain.data.folder import Files, ImageFolder, Samples, content_hash, read_manifest
from hvdtrain.data.storage import cache_root, locked, on_all_cores

SAMPLE = 100  # images whose contents stand for all, where not all are read
# A data set of no more than this is read as a whole. The loader will read it, too.
READ_FILES = 20_000
READ_BYTES = 256 * 2**20
# The cache keeps the hash of so many images or more. Fewer are read as fast as it is.
KEPT_IMAGES = 500
# A file that has changed within so many seconds may change again without another time, where a
# file system counts times in whole seconds.
SETTLED_S = 2.0


@dataclass(frozen=True)
class _Files:
    """What tells whether files are as they were.

    Attributes:
        state: A hash of their names, inodes, sizes and times. Nobody can set the time of a file's
            last change (ctime), so that a stranger's folder has no other folder's state.
        bytes: The sum of their sizes.
        changed: When one of them has last changed, in seconds since 1970.
    """

    state: str
    bytes: int
    changed: float


def identity(folder: ImageFolder) -> str:
    """Returns the `dataset_hash` of a manifest.

    It is `sha256:` and the content_hash; of a large folder that `data build` has not made, it is
    `sample:` and the sample_hash.

    Raises:
        Failure: An image cannot be read.
    """
    if folder.known_hash:
        return folder.known_hash
    if len(folder.train) + len(folder.validation) <= READ_FILES:
        files = _look(folder.images)
        if files.bytes <= READ_BYTES:
            return _content_hash_once(folder, files)
    sample = sample_hash(folder.train, folder.validation)
    built = read_manifest(folder.root).get("content", {})
    if "hash" in built and built.get("sample") == sample:
        return str(built["hash"])
    return f"sample:{sample}"


def _content_hash_once(folder: ImageFolder, files: _Files) -> str:
    """Returns the content_hash, which one process of a host computes.

    The cache keeps it until a file changes. Where the cache cannot be written, each process
    computes it.
    """
    is_settled = files.changed < time.time() - SETTLED_S
    if len(folder.train) + len(folder.validation) < KEPT_IMAGES or not is_settled:
        return content_hash(folder)
    name = hashlib.sha256(os.fsencode(folder.root)).hexdigest()[:32]
    known = cache_root() / "hashes" / f"{name}.json"
    with ExitStack() as held:
        if not _kept(known, files.state):
            with suppress(UsageError):  # the cache cannot be written
                held.enter_context(locked(known))
        found = _kept(known, files.state)
        if not found:
            found = content_hash(folder)
            if _look(folder.images) == files:
                with suppress(OSError):
                    write_whole(known, json.dumps([files.state, found]))
        return found


def _kept(known: Path, state: str) -> str:
    """Returns the hash that the cache has for this state of the files; empty if it has none."""
    try:
        kept = convert(json.loads(known.read_text(encoding="utf-8")), tuple[str, str])
    except (OSError, ValueError):
        return ""
    return kept[1] if kept[0] == state else ""


def _look(paths: Iterable[Path]) -> _Files:
    total = hashlib.sha256()
    size = 0
    changed = 0
    for path in paths:
        status = os.stat(path)
        times = (status.st_mtime_ns, status.st_ctime_ns)
        numbers = (status.st_dev, status.st_ino, status.st_size, *times)
        total.update(b"%s\0%d %d %d %d %d\0" % (os.fsencode(path), *numbers))
        size += status.st_size
        changed = max(changed, *times)
    return _Files(total.hexdigest(), size, changed / 1e9)


def sample_hash(*parts: Samples) -> str:
    """Returns a hash of all paths in these parts of a folder, and of a sample's contents.

    The sample is SAMPLE images of each part, evenly over it. A copy of the folder has the same
    hash, 64 hex digits.

    Raises:
        Failure: An image of the sample cannot be read.
    """
    total = hashlib.sha256()
    for part in filter(None, parts):
        assert isinstance(part, Files)
        classes = b"\0".join(part.folders)
        for column in (classes, part.names, part.starts.tobytes(), part.ends.tobytes()):
            total.update(b"%d\0" % len(column))
            total.update(column)
        count = min(SAMPLE, len(part))
        paths = [part[i * len(part) // count][0] for i in range(count)]
        for _, content in on_all_cores(image.read, paths):
            total.update(hashlib.sha256(content).digest())
    return total.hexdigest()
