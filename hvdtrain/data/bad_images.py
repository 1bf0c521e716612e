"""`--skip-bad`: damaged images of a folder are found before training, once a host, and remembered in the cache."""

import hashlib
import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hvdtrain.data.folder import ImageFolder, scan
from hvdtrain.data.image import digest_or_problem
from hvdtrain.data.storage import cache_root, locked, on_all_cores
from hvdtrain.formatting import printable

NAMED = 20  # images that a manifest names


def without_bad(folder: ImageFolder) -> ImageFolder:
    """The folder without the images that cannot be decoded; `bad` has their paths.

    The first process of a host that asks decodes all images; it is asked anew when a file has another size or time.
    """
    paths = [path for path, _ in chain(folder.train, folder.validation, folder.test)]
    known = cache_root() / "bad-images" / f"{_state(folder.root, paths)}.json"
    known.parent.mkdir(parents=True, exist_ok=True)
    with locked(known):
        try:
            bad = json.loads(known.read_text())
        except (OSError, ValueError):  # nobody has looked yet, or not to the end
            from hvdtrain.console import count_bar  # with rich

            with count_bar("looking") as progress:
                looked_at = on_all_cores(digest_or_problem, paths, len(paths), progress)
                damaged = [path for path, found in looked_at if isinstance(found, str)]
            bad = [path.relative_to(folder.root).as_posix() for path in damaged]
            known.write_text(json.dumps(bad))
    return scan(folder.root, frozenset(bad)) if bad else folder


def summary_of(bad: Sequence[str]) -> dict[str, Any] | None:
    """What a manifest says of them: how many, a hash of all names, and the first names; None where there are none."""
    if not bad:
        return None
    digest = hashlib.sha256(b"\0".join(map(os.fsencode, bad))).hexdigest()
    return {"count": len(bad), "hash": f"sha256:{digest}", "first": [printable(name) for name in bad[:NAMED]]}


def _state(root: Path, paths: list[Path]) -> str:
    """A hash of all files' names, sizes and times."""
    total = hashlib.sha256(os.fsencode(root))
    for path in paths:
        about = path.stat()
        total.update(b"\0%s\0%d %d" % (os.fsencode(path), about.st_size, about.st_mtime_ns))
    return total.hexdigest()[:32]
