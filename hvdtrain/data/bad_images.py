"""`--skip-bad`: finds a folder's damaged images before training, once a host.

The cache keeps what was found.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.formatting import printable, with_noun
from hvdtrain.data.folder import ImageFolder, scan
from hvdtrain.data.image import digest_or_problem
from hvdtrain.data.storage import cache_root, locked, on_all_cores

NAMED = 20  # images that a manifest and a log name


def without_bad(folder: ImageFolder) -> ImageFolder:
    """Returns the folder without the images that cannot be decoded; `bad` has their paths.

    The first process of a host decodes all images, and writes the paths to the cache. They are
    looked for again when a file's size or time changes.
    """
    paths = [path for path, _ in chain(folder.train, folder.validation, folder.test)]
    known = cache_root() / "bad-images" / f"{_state(folder.root, paths)}.json"
    with locked(known):
        try:
            bad = json.loads(known.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # no process has looked yet, or none to the end
            from hvdtrain.base.console import count_bar  # imports rich

            with count_bar("looking") as progress:
                looked_at = on_all_cores(digest_or_problem, paths, len(paths), progress)
                damaged = [path for path, found in looked_at if isinstance(found, str)]
            bad = [path.relative_to(folder.root).as_posix() for path in damaged]
            write_whole(known, json.dumps(bad))
    return scan(folder.root, frozenset(bad)) if bad else folder


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
    total = hashlib.sha256(os.fsencode(root))
    for path in paths:
        status = path.stat()
        total.update(b"\0%s\0%d %d" % (os.fsencode(path), status.st_size, status.st_mtime_ns))
    return total.hexdigest()[:32]
