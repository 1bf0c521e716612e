"""CIFAR-10 and MNIST through torchvision, which knows their addresses, checksums and file formats."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.data.image import png
from hvdtrain.data.selection import Item
from hvdtrain.errors import Failure, UsageError

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe

KNOWN = ("CIFAR10", "MNIST")


class TorchvisionSet:
    """A data set of torchvision: its training images, and its test images as validation images."""

    titles: Mapping[str, str] = {}
    identity = ""  # torchvision verifies checksums, so the images are always the same

    def __init__(self, name: str, root: Path) -> None:
        import numpy as np
        from torchvision import datasets

        dataset = getattr(datasets, name)
        self.parts = {part: dataset(str(root), train=part == "train") for part in ("train", "validation")}
        titles = dataset.classes if name == "MNIST" else self.parts["train"].classes
        self.labels = [title.split(" - ")[0] for title in titles]  # MNIST's are `0 - zero`
        self.pixels = {part: np.asarray(images.data) for part, images in self.parts.items()}

    def items(self, labels: Sequence[str]) -> list[Item]:
        wanted = set(labels)
        return [
            Item(self.labels[target], f"{part}_{index:05d}.png", part, handle=index)
            for part, images in self.parts.items()
            for index, target in enumerate(map(int, images.targets))
            if self.labels[target] in wanted
        ]

    def contents(self, items: Sequence[Item]) -> Iterator[bytes]:
        for item in items:
            yield png(self.pixels[item.part][item.handle])


def open_source(recipe: "Recipe", options: Mapping[str, Any], images_from: Path | None) -> TorchvisionSet:
    from torchvision import datasets

    name = recipe.files["dataset"]
    if name not in KNOWN:
        raise UsageError(f"datasets/{recipe.name}.toml: dataset '{name}' is none of {', '.join(KNOWN)}")
    dataset = getattr(datasets, name)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        root = Path(folder)
        if images_from:
            _copy_files(name, dataset, images_from, root)
        try:
            dataset(folder, download=True)  # files that are there with the right checksum are only unpacked
            return TorchvisionSet(name, root)
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise Failure(
                f"{name} cannot be had: {error}; fetch it elsewhere, and `hvdtrain data build {recipe.name} --archive "
                f"FILE --out {recipe.name}` makes --dataset ./{recipe.name} of it"
            ) from None


def _copy_files(name: str, dataset: Any, images_from: Path, root: Path) -> None:
    """Copy the user's files to where torchvision looks for them, if their checksums are right."""
    from torchvision.datasets.utils import check_integrity

    wanted = dataset.resources if name == "MNIST" else [(dataset.filename, dataset.tgz_md5)]
    target = root / "MNIST" / "raw" if name == "MNIST" else root
    target.mkdir(parents=True, exist_ok=True)
    for file, md5 in wanted:
        found = images_from if images_from.is_file() else next(iter(sorted(images_from.rglob(file))), None)
        if found is None:
            raise UsageError(f"'{images_from}' has no {file}: {name} is {', '.join(file for file, _ in wanted)}")
        if not check_integrity(str(found), md5):
            raise Failure(f"'{found}' is not {name}'s {file}: its MD5 is not {md5}")
        shutil.copyfile(found, target / file)
