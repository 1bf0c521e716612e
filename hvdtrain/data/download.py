"""Downloads of recipes' archives into the cache. A file with a wrong checksum is not kept."""

import hashlib
import os
import urllib.request
from http.client import HTTPException
from pathlib import Path

from hvdtrain.base.console import count_bar
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.storage import cache_root, locked

CHUNK = 2**20
TIMEOUT_S = 60.0


def fetch(recipe: Recipe) -> Path:
    """Returns the path of a recipe's archive in the cache, after downloading it if it is missing.

    Raises:
        UsageError: The recipe has no URL to download from.
        Failure: No URL sends the whole archive with the right checksum.
    """
    origin = recipe.origin
    if not origin:
        raise UsageError(
            f"{recipe.name} cannot be downloaded: build a folder from files you have, with "
            f"`hvdtrain data build {recipe.name} --out FOLDER` and --archive FILE or "
            "--source FOLDER"
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
        raise Failure(
            f"{recipe.name} cannot be downloaded ({'; '.join(problems)}); try --archive FILE"
        )


def _download(url: str, partial: Path, origin: dict, name: str) -> None:
    """Downloads a URL to the file `partial`.

    Raises:
        OSError: The download fails, or its size or checksum is not the recipe's.
    """
    checksum = hashlib.new("sha256" if "sha256" in origin else "md5")
    size = origin["bytes"]
    received = 0
    with (
        urllib.request.urlopen(url, timeout=TIMEOUT_S) as response,
        partial.open("wb") as file,
        count_bar(f"downloading {name}", "bytes") as progress,
    ):
        while chunk := response.read(CHUNK):
            received += len(chunk)
            if received > size:
                raise OSError(f"it sends more than the {size:,} bytes that the recipe names")
            file.write(chunk)
            checksum.update(chunk)
            progress(received, size)
        file.flush()
        os.fsync(file.fileno())
    if received < size:
        raise OSError(f"cut off after {received:,} of {size:,} bytes")
    if checksum.hexdigest() != origin[checksum.name]:
        raise OSError(f"its {checksum.name} is {checksum.hexdigest()}, not {origin[checksum.name]}")
