"""The content hash of a data set, kept in the user's cache for as long as none of its files has changed."""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from hvdtrain.data.folder import ImageFolder, content_hash
from hvdtrain.data.storage import cache_root, locked
from hvdtrain.errors import UsageError

# A file may be written again within the same tick of its file system's clock, and look unchanged: what has files as
# new as this is not kept. The coarsest clock, FAT's, ticks every two seconds.
SETTLED_S = 3.0


def kept_content_hash(folder: ImageFolder) -> str:
    """As data.folder.content_hash, from the cache where every image has the path, size and times that it had then.

    Of several processes of a host that ask at the same time, one reads the images and the others wait for it. A cache
    that cannot be written in is no error: nothing is kept.

    Raises:
        UsageError: an image cannot be read.
    """
    if folder.known_hash:
        return folder.known_hash
    kept = cache_root() / "hashes" / f"{hashlib.sha256(os.fsencode(folder.root)).hexdigest()[:24]}.json"
    if found := _find(kept, _listing(folder)[0]):
        return found
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(UsageError, OSError):
            stack.enter_context(locked(kept))
        listing, newest = _listing(folder)
        if found := _find(kept, listing):  # by the process that this one has waited for
            return found
        settled = newest < time.time() - SETTLED_S
        found = content_hash(folder)
        if settled:
            _keep(kept, {"folder": str(folder.root), "listing": listing, "content_hash": found})
        return found


def _listing(folder: ImageFolder) -> tuple[str, float]:
    """A hash over path, size, and times of modification and of change of each image; and the newest time, in seconds.

    The time of change (ctime) tells a file that was replaced by one with an older date.
    """
    total, newest = hashlib.sha256(), 0
    try:
        for path, _ in folder.train + folder.validation:
            found = path.stat()
            newest = max(newest, found.st_mtime_ns, found.st_ctime_ns)
            line = f"{path}\0{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}\n"
            total.update(line.encode(errors="surrogateescape"))
    except OSError as error:
        raise UsageError(f"cannot read '{error.filename}': {error.strerror}") from None
    return total.hexdigest(), newest / 1e9


def _find(kept: Path, listing: str) -> str:
    """The content hash that was kept for this listing; empty where there is none."""
    try:
        content = json.loads(kept.read_text())
        return str(content["content_hash"]) if content["listing"] == listing else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _keep(kept: Path, content: dict[str, str]) -> None:
    partial = kept.with_name(f"{kept.name}.{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(content))
        partial.rename(kept)
