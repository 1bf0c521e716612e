"""Finds the data set that `--dataset` names: a recipe, a folder, Parquet files in a folder or at a URL, or a user's own
function.
"""

import os
from pathlib import Path

from hvdtrain.config import recipes
from hvdtrain.data.bad_images import without_bad
from hvdtrain.data.build import build, is_built
from hvdtrain.data.folder import ImageFolder, has_classes, scan
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.storage import cache_root
from hvdtrain.data.synthetic import NAME, synthetic
from hvdtrain.errors import UsageError, unknown
from hvdtrain.system.own_code import is_code


def find_dataset(dataset: str, skip_bad: bool = False) -> ImageFolder:
    """List the images of the data set that `--dataset` names.

    Args:
        skip_bad: without a folder's damaged images, which are looked for first.

    Raises:
        UsageError: there is no such data set.
    """
    if dataset == NAME:
        return synthetic()
    if is_code(dataset) and not is_url(dataset):
        from hvdtrain.data.own import own_data  # imports torch

        return own_data(dataset)
    from hvdtrain.data import packed  # imports numpy

    place = dataset.rstrip("/")
    if not is_url(dataset):
        folder = locate_folder(dataset)
        if not packed.is_packed(folder) or has_classes(folder):
            images = scan(folder)
            return without_bad(images) if skip_bad else images
        place = str(folder)
    if skip_bad:
        raise UsageError("--skip-bad is for folders: pack what `hvdtrain data check` finds no fault with")
    return packed.read(place)


def is_name(dataset: str) -> bool:
    """Whether `--dataset` is a recipe's name, or `synthetic`: not a path, and not a URL."""
    return dataset == NAME or dataset in recipes.names("datasets")


def is_url(dataset: str) -> bool:
    """Whether `--dataset` is a URL for fsspec: `s3://…`, `hf://datasets/…`, `simplecache::https://…`."""
    return "://" in dataset


def locate_folder(dataset: str) -> Path:
    """The folder of a data set, resolved. A recipe is built into the user's cache on first use.

    A recipe's name takes precedence over a folder of that name; `./NAME` is the folder. Several processes may call
    this at the same time: one builds, the others wait. What is in a user's folder is not checked.

    Raises:
        UsageError: it is neither a recipe, which are listed, nor a folder.
    """
    if dataset in recipes.names("datasets"):
        request = Recipe.load(dataset).request()
        folder = cache_root() / "datasets" / f"{dataset}-{request.key[:12]}"
        is_damaged = folder.exists() and not is_built(request, folder)
        return build(dataset, folder, force=is_damaged)
    if dataset.endswith(".py"):
        raise UsageError(f"--dataset {dataset} names no function: give {dataset}:data, say")
    try:
        folder = Path(dataset).expanduser()
        if os.sep in dataset or folder.is_dir():
            return folder.resolve()
    except (OSError, RuntimeError) as error:  # a name too long, a home that nobody has, links in a circle
        raise UsageError(f"--dataset {dataset[:80]} cannot be looked at: {error}") from None
    valid = sorted([*recipes.names("datasets"), NAME])
    raise UsageError(f"{unknown('data set', dataset, valid)}, or give a folder such as ./{dataset}")
