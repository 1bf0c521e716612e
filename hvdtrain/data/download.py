"""Downloads a recipe's archive into the cache; it is kept if its checksum is right."""

import hashlib
import os
import urllib.request
from http.client import HTTPException
from pathlib import Path

from hvdtrain.console import count_bar
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.storage import cache_root, locked
from hvdtrain.errors import Failure, UsageError

CHUNK = 2**20
TIMEOUT_S = 60.0


def fetch(recipe: Recipe) -> Path:
    """The recipe's archive in the cache, downloaded if it is not there.

    Raises:
        UsageError: the recipe has no address to download from.
        Failure: no address sends the whole archive, or its checksum is wrong.
    """
    origin = recipe.origin
    if not origin:
        raise UsageError(
            f"{recipe.name} cannot be downloaded: build a folder from files you have, with `hvdtrain data build "
            f"{recipe.name} --out FOLDER` and --archive FILE or --source FOLDER"
        )
    target = cache_root() / "downloads" / str(origin["file"])
    with locked(target):
        if target.is_file():
            return target
        partial = target.with_name(f"{target.name}.partial")
        problems = []
        for url in origin["urls"]:
            try:
                _download(url, partial, origin, recipe.name)
            except (OSError, HTTPException) as error:
                problems.append(f"{url}: {getattr(error, 'reason', None) or error}")
                partial.unlink(missing_ok=True)
            else:
                partial.rename(target)
                return target
        raise Failure(f"{recipe.name} cannot be downloaded ({'; '.join(problems)}); try --archive FILE")


def _download(url: str, partial: Path, origin: dict, name: str) -> None:
    """Write the partial file. OSError if the server sends less, more or something else than the recipe names."""
    checksum, size, have = hashlib.new("sha256" if "sha256" in origin else "md5"), origin["bytes"], 0
    with (
        urllib.request.urlopen(url, timeout=TIMEOUT_S) as response,
        partial.open("wb") as file,
        count_bar(f"downloading {name}", "bytes") as progress,
    ):
        while chunk := response.read(CHUNK):
            have += len(chunk)
            if have > size:
                raise OSError(f"it sends more than the {size:,} bytes that the recipe names")
            file.write(chunk)
            checksum.update(chunk)
            progress(have, size)
        file.flush()
        os.fsync(file.fileno())
    if have < size:
        raise OSError(f"cut off after {have:,} of {size:,} bytes")
    if checksum.hexdigest() != origin[checksum.name]:
        raise OSError(f"its {checksum.name} is {checksum.hexdigest()}, not {origin[checksum.name]}")
