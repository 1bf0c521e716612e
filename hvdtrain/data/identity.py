"""What says that two runs had the same images, found without reading a large data set: `dataset_hash` in a manifest.

datasets/README.md says what it stands for. A process of each host looks at the files' sizes and times, and what it
finds is kept in the user's cache.
"""

import contextlib
import hashlib
import os
import socket
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain.data.folder import MANIFEST, Files, ImageFolder, content_hash, read_manifest
from hvdtrain.data.storage import cache_root, locked
from hvdtrain.errors import UsageError

# A file may be written again within the same tick of its file system's clock, and look unchanged: what has files as
# new as this is not kept. The coarsest clock, FAT's, ticks every two seconds.
SETTLED_S = 3.0
# A data set that `data build` has not made is read if it has no more than this: the loader will, too.
READ_FILES, READ_BYTES = 20_000, 256 * 2**20


@dataclass(frozen=True)
class Listing:
    """Sizes and times of a folder's images for training and validation.

    Attributes:
        bytes: of all files together.
        newest: the latest time of a file, in seconds since 1970.
        sizes: a hash of all paths and sizes, which a copy of the folder has too.
        times: of paths, sizes and times of modification in whole seconds, which copies that keep times have too.
        exact: of paths, sizes, and times of modification and of change to the nanosecond. The time of change tells a
            file that was replaced by one with an older date.
    """

    bytes: int
    newest: float
    sizes: str
    times: str
    exact: str


class Kept(msgspec.Struct):
    """What the cache keeps of a folder: its identity, when that was found, and of which listing and build."""

    identity: str = ""
    found_at: float = 0.0
    exact: str = ""
    times: str = ""
    built: str = ""
    settled: bool = False


def look(folder: ImageFolder) -> Listing:
    """The sizes and times of its files, of which it opens none. UsageError where one cannot be looked at."""
    names, sizes, modified, changed = hashlib.sha256(), array("q"), array("q"), array("q")
    try:
        for part in (folder.train, folder.validation):
            assert isinstance(part, Files)
            for below, files in part.by_class():
                names.update(b"%b\0%b\0\0" % (below, b"\0".join(files)))
                parent = os.path.join(os.fsencode(folder.root), below, b"")
                found = [os.stat(parent + file) for file in files]
                sizes.extend([one.st_size for one in found])
                modified.extend([one.st_mtime_ns for one in found])
                changed.extend([one.st_ctime_ns for one in found])
    except OSError as error:
        raise UsageError(f"cannot read '{os.fsdecode(error.filename)}': {error.strerror}") from None
    seconds = array("q", [time_ns // 10**9 for time_ns in modified])
    return Listing(
        sum(sizes), max(max(modified), max(changed)) / 1e9, _hash(names, sizes), _hash(names, sizes, seconds),
        _hash(names, sizes, modified, changed),
    )  # fmt: skip


def _hash(names: Any, *columns: array) -> str:
    total = names.copy()
    for column in columns:
        total.update(column.tobytes())
    return total.hexdigest()


def identity(folder: ImageFolder) -> str:
    """What a manifest has as `dataset_hash`: `sha256:` and the content_hash, or `listing:` and Listing.times of a large
    folder that `data build` has not made.

    Of several processes of a host that ask at the same time, one looks at the files and the others wait for it. A cache
    that cannot be written in is no error: nothing is kept.

    Raises:
        UsageError: an image cannot be read.
    """
    if folder.known_hash:
        return folder.known_hash
    asked, kept = time.time(), _place(folder)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(UsageError, OSError):
            stack.enter_context(locked(kept))
        before = _read(kept)
        if asked <= before.found_at <= time.time():  # by another process, while this one waited
            return before.identity
        began = time.time()
        listing = look(folder)
        found = _identity(folder, listing, before)
        _keep(kept, folder, listing, began, found)
        return found


def keep_content_hash(folder: ImageFolder, listing: Listing, began: float, found: str) -> None:
    """For later runs: since `began`, when the files were as in the listing, all have been read: their content_hash."""
    kept = _place(folder)
    with contextlib.suppress(UsageError, OSError), locked(kept):
        if look(folder) == listing:
            _keep(kept, folder, listing, began, found)


def _identity(folder: ImageFolder, listing: Listing, before: Kept) -> str:
    if before.settled and before.exact == listing.exact:
        return before.identity
    built = read_manifest(folder.root).get("content", {})
    # What was built holds what it was built with, unless it was seen as that before, and has changed since.
    if "hash" in built and built.get("sizes") == listing.sizes and before.built != _stamp(folder):
        return str(built["hash"])
    if len(folder.train) + len(folder.validation) <= READ_FILES and listing.bytes <= READ_BYTES:
        return content_hash(folder)
    if before.times == listing.times:  # a link more to each file, for one, changes the time of change
        return before.identity
    return f"listing:{listing.times}"


def _place(folder: ImageFolder) -> Path:
    """Hosts that share a home may have other files under the same path."""
    key = os.fsencode(socket.gethostname()) + b"\0" + os.fsencode(folder.root)
    return cache_root() / "identities" / f"{hashlib.sha256(key).hexdigest()[:24]}.json"


def _stamp(folder: ImageFolder) -> str:
    """Differs each time that the folder is built; empty where it was not."""
    try:
        found = (folder.root / MANIFEST).stat()
        return f"{found.st_ino} {found.st_mtime_ns}"
    except OSError:
        return ""


def _read(kept: Path) -> Kept:
    """What was kept; empty where nothing is, or it cannot be read."""
    try:
        return msgspec.json.decode(kept.read_bytes(), type=Kept)
    except (OSError, ValueError):
        return Kept()


def _keep(kept: Path, folder: ImageFolder, listing: Listing, began: float, found: str) -> None:
    settled = listing.newest < began - SETTLED_S
    content = Kept(found, time.time(), listing.exact, listing.times, _stamp(folder), settled)
    partial = kept.with_name(f"{kept.name}.{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        partial.write_bytes(msgspec.json.encode(content))
        partial.rename(kept)
