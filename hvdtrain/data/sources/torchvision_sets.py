"""CIFAR-10 and MNIST by way of torchvision, which knows where they are, their checksums and their file formats."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.data.image import png
from hvdtrain.data.select import Item
from hvdtrain.errors import Failure, UsageError

if TYPE_CHECKING:
    from hvdtrain.data.recipe import Recipe

KNOWN = ("CIFAR10", "MNIST")


class Published:
    """A data set of torchvision: its training images, and its test images as validation images."""

    titles: Mapping[str, str] = {}
    identity = ""  # torchvision checks the checksums: there is one such data set

    def __init__(self, name: str, root: Path) -> None:
        import numpy as np
        from torchvision import datasets

        kind = getattr(datasets, name)
        self.parts = {part: kind(str(root), train=part == "train") for part in ("train", "validation")}
        titles = kind.classes if name == "MNIST" else self.parts["train"].classes
        self.labels = [title.split(" - ")[0] for title in titles]  # MNIST's are `0 - zero`
        self.pixels = {part: np.asarray(found.data) for part, found in self.parts.items()}

    def items(self, labels: Sequence[str]) -> list[Item]:
        wanted = set(labels)
        return [
            Item(self.labels[target], f"{part}_{index:05d}.png", part, handle=index)
            for part, found in self.parts.items()
            for index, target in enumerate(map(int, found.targets))
            if self.labels[target] in wanted
        ]

    def contents(self, items: Sequence[Item]) -> Iterator[bytes]:
        for item in items:
            yield png(self.pixels[item.part][item.handle])


def open_source(recipe: "Recipe", options: Mapping[str, Any], place: Path | None) -> Published:
    from torchvision import datasets

    name = recipe.files["dataset"]
    if name not in KNOWN:
        raise UsageError(f"datasets/{recipe.name}.toml: dataset '{name}' is none of {', '.join(KNOWN)}")
    kind = getattr(datasets, name)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        root = Path(folder)
        if place:
            _lay_out(name, kind, place, root)
        try:
            kind(folder, download=True)  # what is there with the right checksum is unpacked, and not downloaded
            return Published(name, root)
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise Failure(f"{name} cannot be had: {error}; give its files with --archive or --source") from None


def _lay_out(name: str, kind: Any, place: Path, root: Path) -> None:
    """Put what the user has where torchvision looks for it, if its checksums are right."""
    from torchvision.datasets.utils import check_integrity

    wanted = kind.resources if name == "MNIST" else [(kind.filename, kind.tgz_md5)]
    target = root / "MNIST" / "raw" if name == "MNIST" else root
    target.mkdir(parents=True, exist_ok=True)
    for file, md5 in wanted:
        found = place if place.is_file() else next(iter(sorted(place.rglob(file))), None)
        if found is None:
            raise UsageError(f"'{place}' has no {file}: {name} is {', '.join(file for file, _ in wanted)}")
        if not check_integrity(str(found), md5):
            raise Failure(f"'{found}' is not {name}'s {file}: its MD5 is not {md5}")
        shutil.copyfile(found, target / file)
