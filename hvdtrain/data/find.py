"""Resolution of `--dataset`: a recipe, a folder, Parquet files, or a user's own function."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

from hvdtrain.base.config import recipes
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.config.untrusted import check_not_endless, is_url
from hvdtrain.base.errors import UsageError, unknown
from hvdtrain.base.system.own_code import is_code
from hvdtrain.data.bad_images import without_bad
from hvdtrain.data.build import build, is_built
from hvdtrain.data.folder import ImageFolder, has_classes, scan
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.storage import cache_root
from hvdtrain.data.synthetic import NAME, synthetic


def find_dataset_of(config: RunConfig) -> ImageFolder:
    """Lists the images of the data set of a configuration; see find_dataset."""
    return find_dataset(config.dataset, config.skip_bad, config.label, config.validation)


def find_dataset(
    dataset: str, skip_bad: bool = False, label: str = "", validation: float = 0.0
) -> ImageFolder:
    """Lists the images of the data set that `--dataset` names.

    Args:
        dataset: The value of `--dataset`.
        skip_bad: Whether damaged images are found first, and left out.
        label: The column of classes in Parquet files; empty to find it.
        validation: The share of training images to validate on, where Parquet files have a training
            part alone.

    Raises:
        UsageError: There is no such data set, or an option is for another kind.
    """
    check_not_endless("--dataset", dataset)
    images = _find(dataset, skip_bad, label, validation)
    if is_name(dataset) and Path(dataset).is_dir():
        note = (
            f"{dataset} is the built-in data set, and not the folder of that name here: "
            f"--dataset ./{dataset} is that"
        )
        images = replace(images, notes=(note, *images.notes))
    return images


def count_training_samples(config: RunConfig) -> int | None:
    """Returns how many training samples a data set has, if that takes no build and no download.

    It runs no code of the user, and looks for no damaged images.

    Returns:
        None for URLs, for a function of the user, and for recipes that have not been built.

    Raises:
        UsageError: There is no such data set, or an option is for another kind.
    """
    dataset = config.dataset
    if is_url(dataset) or is_code(dataset):
        return None
    if dataset in recipes.names("datasets") and not is_built(*_request_and_folder(dataset)):
        return None
    return len(_find(dataset, False, config.label, config.validation).train)


def _find(dataset: str, skip_bad: bool, label: str, validation: float) -> ImageFolder:
    if is_parquet(dataset):
        from hvdtrain.data import packed  # imports numpy

        place = dataset.rstrip("/") if is_url(dataset) else str(locate_folder(dataset))
        return packed.read(place, label, validation, skip_bad)
    if label:
        raise UsageError(
            f"--label names a column of Parquet files, and {dataset} has none: classes are folders"
        )
    if validation:
        raise UsageError(
            f"--validation is for Parquet files, and {dataset} has none: `hvdtrain data build "
            f"folder --source {shlex.quote(dataset)} --validation {validation:g} --out NEW` splits "
            "a folder"
        )
    if dataset == NAME:
        return synthetic()
    if is_code(dataset):
        from hvdtrain.data.own import own_data  # imports torch

        return own_data(dataset)
    images = scan(locate_folder(dataset))
    return without_bad(images) if skip_bad else images


def is_parquet(dataset: str) -> bool:
    """Returns whether `--dataset` is a URL, a Parquet file, or a folder of some without classes."""
    if is_url(dataset):
        return True
    if dataset == NAME or is_code(dataset):
        return False
    from hvdtrain.data import packed  # imports numpy

    folder = locate_folder(dataset)
    return packed.is_packed(folder) and (folder.is_file() or not has_classes(folder))


def is_name(dataset: str) -> bool:
    """Returns whether `--dataset` is a recipe's name or `synthetic`: neither a path nor a URL."""
    return dataset == NAME or dataset in recipes.names("datasets")


def locate_folder(dataset: str) -> Path:
    """Returns the resolved folder of a data set. Builds a recipe into the cache on first use.

    A recipe's name takes precedence over a folder of that name; `./NAME` is the folder. Several
    processes may call this at the same time: one builds, the others block. The content of a user's
    folder is not checked.

    Raises:
        UsageError: There is neither a recipe nor a folder. The message lists the recipes.
    """
    if dataset in recipes.names("datasets"):
        request, folder = _request_and_folder(dataset)
        is_damaged = folder.exists() and not is_built(request, folder)
        return build(dataset, folder, force=is_damaged)
    if dataset.endswith(".py"):
        raise UsageError(f"--dataset {dataset} names no function: give {dataset}:data, say")
    try:
        folder = Path(dataset).expanduser()
        if os.sep in dataset or folder.exists():
            return folder.resolve()
    except (OSError, RuntimeError) as error:
        # The name is too long, a home folder is unknown, or links lead in a circle.
        raise UsageError(f"--dataset {dataset[:80]} cannot be looked at: {error}") from None
    valid = sorted([*recipes.names("datasets"), NAME])
    raise UsageError(f"{unknown('data set', dataset, valid)}, or give a folder such as ./{dataset}")


def _request_and_folder(name: str) -> tuple[Recipe, Path]:
    """Returns what is asked of a recipe by default, and where in the cache it is built."""
    request = Recipe.load(name).request()
    return request, cache_root() / "datasets" / f"{name}-{request.key[:12]}"
