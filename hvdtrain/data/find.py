"""What `--dataset` stands for: a recipe's name, a folder, or a URL of shards."""

import os
import shutil
from pathlib import Path

from hvdtrain import recipes
from hvdtrain.data.build import build, is_built
from hvdtrain.data.folder import ImageFolder, scan
from hvdtrain.data.place import cache_root, locked
from hvdtrain.data.recipe import Recipe
from hvdtrain.errors import UsageError, unknown


def find(dataset: str) -> ImageFolder:
    """The images that `--dataset` names. UsageError where there are none, or they are no data set."""
    if is_url(dataset):
        from hvdtrain.data import shards

        return shards.read(dataset)
    return scan(locate(dataset))


def is_url(dataset: str) -> bool:
    """Whether it is of shards elsewhere, as fsspec names them: `s3://…`, `https://…`, `simplecache::https://…`."""
    return "://" in dataset


def locate(dataset: str) -> Path:
    """The folder of a data set, resolved: a recipe's name (built into the user's cache on first use) or a folder.

    The name of a recipe comes before a folder of that name; `./NAME` is the folder. Any number of processes may ask
    at once: one builds, the others wait.

    Raises:
        UsageError: neither a name nor a folder; the names are listed. What is in a folder is not looked at.
    """
    if dataset in recipes.names("datasets"):
        order = Recipe.load(dataset).choose()
        folder = cache_root() / "datasets" / f"{dataset}-{order.key[:12]}"
        if is_built(order, folder):
            return folder.resolve()
        with locked(folder):
            if folder.exists() and not is_built(order, folder):  # the cache is ours: what is damaged goes
                shutil.rmtree(folder)
        return build(dataset, folder)
    try:
        folder = Path(dataset).expanduser()
        if os.sep in dataset or folder.is_dir():
            return folder.resolve()
    except (OSError, RuntimeError) as error:  # a name too long, a home that nobody has, links in a circle
        raise UsageError(f"--dataset {dataset[:80]} cannot be looked at: {error}") from None
    raise UsageError(f"{unknown('data set', dataset, recipes.names('datasets'))}, or give a folder such as ./{dataset}")
