"""CIFAR-10 and MNIST through torchvision, which knows their addresses, checksums and file formats."""

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.data.image import png
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import Generated, Item
from hvdtrain.data.sources import Source
from hvdtrain.errors import Failure, UsageError


def open_source(recipe: Recipe, images_from: Path | None) -> Source:
    """Its training images, and its test images as validation images."""
    from torchvision import datasets

    name = recipe.files["dataset"]
    kind = getattr(datasets, name)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        if images_from:
            _copy_files(name, kind, images_from, Path(folder))
        try:
            kind(folder, download=True)  # files that are there with the right checksum are only unpacked
            sets = {part: kind(folder, train=part == "train") for part in ("train", "validation")}
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise Failure(
                f"{name} cannot be had: {error}; fetch it elsewhere, and `hvdtrain data build {recipe.name} --archive "
                f"FILE --out {recipe.name}` makes --dataset ./{recipe.name} of it"
            ) from None
    labels = [title.split(" - ")[0] for title in sets["train"].classes]  # MNIST's are `0 - zero`
    items = [
        Item(labels[target], f"{part}_{index:05d}.png", part, handle=Generated(partial(png, images.data[index])))
        for part, images in sets.items()
        for index, target in enumerate(map(int, images.targets))
    ]
    return Source(lambda: items)


def _copy_files(name: str, dataset: Any, images_from: Path, root: Path) -> None:
    """Copy the user's files to where torchvision looks for them, if their checksums are right."""
    from torchvision.datasets.utils import check_integrity

    wanted = dataset.resources if name == "MNIST" else [(dataset.filename, dataset.tgz_md5)]
    target = root / "MNIST" / "raw" if name == "MNIST" else root
    target.mkdir(parents=True, exist_ok=True)
    for file, md5 in wanted:
        given = images_from if images_from.is_file() else next(iter(sorted(images_from.rglob(file))), None)
        if given is None:
            raise UsageError(f"'{images_from}' has no {file}: {name} is {', '.join(file for file, _ in wanted)}")
        if not check_integrity(str(given), md5):
            raise Failure(f"'{given}' is not {name}'s {file}: its MD5 is not {md5}")
        shutil.copyfile(given, target / file)
