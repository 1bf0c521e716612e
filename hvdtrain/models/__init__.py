"""One module a family of models: `vgg.py` makes `--model vgg16`, and adding a family is adding a file.

Names are checked where torch would take too long to import, so a family's module imports it in its function only:

    NAMES        every model's name
    WORDS        the same for people
    LEAST_SIDE   pixels of the smallest image that it takes
    HAS_DROPOUT  whether its head has a layer for `--dropout`
    IMAGENET     by name, torchvision's model whose weights it starts from with `--pretrained imagenet`
    build(name, classes, scaled, dropout) -> Network
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError, unknown

if TYPE_CHECKING:
    from hvdtrain.models.layers import Network

_SHARED = {"__init__", "layers", "pretrained"}  # not families


def families() -> list[ModuleType]:
    stems = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _SHARED)
    return [importlib.import_module(f"hvdtrain.models.{stem}") for stem in stems]


def words() -> list[str]:
    """Which models there are, for people; there are too many to list each."""
    return [family.WORDS for family in families()]


def family(name: str) -> ModuleType:
    """The module of the family that a model is of. UsageError, saying what there is, for an unknown name."""
    for found in families():
        if name in found.NAMES:
            return found
    raise unknown("model", name, words())


def check(name: str, image_size: int, dropout: float, pretrained: str) -> None:
    """UsageError where there is no such model, or it can do nothing with one of these options.

    Args:
        image_size: 0 for the data set's own, which is large enough for every model.
    """
    own = family(name)
    if 0 < image_size < own.LEAST_SIDE:
        raise UsageError(f"--image-size {image_size} is too small: {name} takes images of at least {own.LEAST_SIDE}")
    if dropout and not own.HAS_DROPOUT:
        raise UsageError(f"--dropout does nothing in {name}: its head is one layer")
    if pretrained == "imagenet" and name not in own.IMAGENET:
        raise UsageError(f"--pretrained imagenet: {name} is not for ImageNet, and there are no such weights")


def make(name: str, classes: int, width: float = 1.0, dropout: float = 0.0) -> "Network":
    """A model with fresh weights, drawn from torch's generator.

    Args:
        classes: outputs.
        width: 1 gives the published layers; channels and hidden layers are scaled, each to at least 1.
        dropout: probability after the hidden layers of the head.
    """
    return family(name).build(name, classes, lambda n: max(1, round(n * width)), dropout)
