"""`--skip-bad`: finds damaged images of a folder, or of Parquet files, before training, once a host.

The cache keeps what was found.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import convert

from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import Failure
from hvdtrain.base.formatting import printable, with_noun
from hvdtrain.data.folder import ImageFolder, ManyImages, scan
from hvdtrain.data.image import decode, digest_or_problem
from hvdtrain.data.storage import cache_root, locked, on_all_cores

NAMED = 20  # images that a manifest and a log name


def without_bad(folder: ImageFolder) -> ImageFolder:
    """Returns the folder without the images that cannot be decoded; `bad` has their paths.

    The first process of a host decodes all images, and writes the paths to the cache. They are
    looked for again when a file's size or time changes.
    """
    paths = [path for path, _ in chain(folder.train, folder.validation, folder.test)]

    def is_bad(path: Path) -> bool:
        return isinstance(digest_or_problem(path), str)

    found = _find_bad(paths, is_bad, _state(folder.root, paths))
    bad = [paths[index].relative_to(folder.root).as_posix() for index in found]
    return scan(folder.root, frozenset(bad)) if bad else folder


def bad_rows(images: ManyImages, state: str) -> list[int]:
    """Returns the indices of the images in a part of Parquet files that cannot be decoded.

    The first process of a host decodes all.

    Args:
        images: The images of the part.
        state: Text that changes when the files do, for the cache.

    Raises:
        Unread: A file cannot be read.
    """

    def is_bad(index: int) -> bool:
        sample, _ = images[index]
        content = sample.read_bytes()
        try:
            decode(content, str(sample))
        except Failure:
            return True
        return False

    key = hashlib.sha256(state.encode()).hexdigest()[:32]
    return _find_bad(range(len(images)), is_bad, key)


def _find_bad(items: Sequence[Any], is_bad: Callable[[Any], bool], key: str) -> list[int]:
    """Returns the indices of the items that are bad, of the cache where it has them.

    Args:
        items: What is looked at.
        is_bad: Whether an item is bad.
        key: The name of the file in the cache.
    """
    known = cache_root() / "bad-images" / f"{key}.json"
    with locked(known):
        try:
            return convert(json.loads(known.read_text(encoding="utf-8")), list[int])
        except (OSError, ValueError):  # no process has looked yet, or none to the end
            from hvdtrain.base.console import count_bar  # imports rich

            with count_bar("looking") as progress:
                looked_at = on_all_cores(is_bad, items, len(items), progress)
                bad = [index for index, (_, found) in enumerate(looked_at) if found]
            write_whole(known, json.dumps(bad))
            return bad


def summary_of(bad: Sequence[str]) -> dict[str, Any] | None:
    """Returns what a manifest says about images that were left out; None if there are none.

    It is their number, a hash of all their names, and the first NAMED names.
    """
    if not bad:
        return None
    digest = hashlib.sha256(b"\0".join(map(os.fsencode, bad))).hexdigest()
    return {
        "count": len(bad),
        "hash": f"sha256:{digest}",
        "first": [printable(name) for name in bad[:NAMED]],
    }


def lines_of_bad(bad: Sequence[str]) -> list[str]:
    """Returns lines that name the images that were left out, but no more than NAMED."""
    if not bad:
        return []
    lines = [f"--skip-bad left out {with_noun(len(bad), 'damaged image')}:"]
    lines += [f"  {printable(name)}" for name in bad[:NAMED]]
    if len(bad) > NAMED:
        lines.append(f"  and {len(bad) - NAMED:,} more, which `hvdtrain data check` names")
    return lines


def _state(root: Path, paths: list[Path]) -> str:
    """Returns a hash of all files' names, sizes and times."""
    total = hashlib.sha256(b"by index\0" + os.fsencode(root))
    for path in paths:
        status = path.stat()
        total.update(b"\0%s\0%d %d" % (os.fsencode(path), status.st_size, status.st_mtime_ns))
    return total.hexdigest()[:32]
