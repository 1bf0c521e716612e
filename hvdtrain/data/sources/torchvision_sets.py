"""CIFAR-10 and MNIST through torchvision, which has their URLs, checksums and file formats."""

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data.image import png
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Generated, Item
from hvdtrain.data.sources import Source


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    """Opens the training images, and the test images as validation images."""
    from torchvision import datasets

    name = recipe.files["dataset"]
    dataset = getattr(datasets, name)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        if images_from:
            _copy_files(name, dataset, images_from, Path(folder))
        try:
            # Files that are there with the right checksum are only unpacked.
            dataset(folder, download=True)
            train = dataset(folder, train=True)
            validation = dataset(folder, train=False)
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise Failure(
                f"{name} cannot be had: {error}; fetch it elsewhere, and `hvdtrain data build "
                f"{recipe.name} --archive FILE --out {recipe.name}` makes --dataset "
                f"./{recipe.name} of it"
            ) from None
    labels = [title.split(" - ")[0] for title in train.classes]  # MNIST's titles are `0 - zero`
    items = []
    for part, images in {"train": train, "validation": validation}.items():
        for index, target in enumerate(map(int, images.targets)):
            handle = Generated(partial(png, images.data[index]))
            items.append(Item(labels[target], f"{part}_{index:05d}.png", part, handle=handle))
    return Source(lambda: items)


def _copy_files(name: str, dataset: Any, images_from: Path, root: Path) -> None:
    """Copies the user's files to the folder in which torchvision looks for them.

    Args:
        name: The name of the data set.
        dataset: torchvision's class for it.
        images_from: The user's file, or a folder that has the files.
        root: The folder that torchvision is given.

    Raises:
        UsageError: A file is missing.
        Failure: A file has another checksum than torchvision names.
    """
    from torchvision.datasets.utils import check_integrity

    if name == "MNIST":
        wanted = dataset.resources
        target = root / "MNIST" / "raw"
    else:
        wanted = [(dataset.filename, dataset.tgz_md5)]
        target = root
    target.mkdir(parents=True, exist_ok=True)
    for file, md5 in wanted:
        found = [images_from] if images_from.is_file() else sorted(images_from.rglob(file))
        if not found:
            names = ", ".join(file for file, _ in wanted)
            raise UsageError(f"'{images_from}' has no {file}: {name} is {names}")
        if not check_integrity(str(found[0]), md5):
            raise Failure(f"'{found[0]}' is not {name}'s {file}: its MD5 is not {md5}")
        shutil.copyfile(found[0], target / file)
