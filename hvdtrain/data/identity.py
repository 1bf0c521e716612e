"""The `dataset_hash` of a manifest, which tells whether two runs had the same images.

Of a large data set only a sample is read. datasets/README.md describes the hash.
"""

import hashlib
import json
import os
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

from msgspec import convert

from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.data import image
from hvdtrain.data.file_states import FileStates, look
from hvdtrain.data.folder import Files, ImageFolder, Samples, content_hash, read_manifest
from hvdtrain.data.storage import cache_root, locked, on_all_cores

SAMPLE = 100  # images whose contents stand for all, where not all are read
# A data set of no more than this is read as a whole. The loader will read it, too.
READ_FILES = 20_000
READ_BYTES = 256 * 2**20
# The cache keeps the hash of so many images or more. Fewer are read as fast as it is.
KEPT_IMAGES = 500


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
        files = _look(folder)
        if files.bytes <= READ_BYTES:
            return _content_hash_once(folder, files)
    sample = sample_hash(folder.train, folder.validation)
    built = read_manifest(folder.root).get("content", {})
    if "hash" in built and built.get("sample") == sample:
        return str(built["hash"])
    return f"sample:{sample}"


def _content_hash_once(folder: ImageFolder, files: FileStates) -> str:
    """Returns the content_hash, which one process of a host computes.

    The cache keeps it until a file changes. Where the cache cannot be written, each process
    computes it.
    """
    if len(folder.train) + len(folder.validation) < KEPT_IMAGES or not files.are_settled:
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
            if _look(folder) == files:
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


def _look(folder: ImageFolder) -> FileStates:
    assert isinstance(folder.train, Files)
    assert isinstance(folder.validation, Files)
    return look(chain(folder.train.paths(), folder.validation.paths()))


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
