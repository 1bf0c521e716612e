"""Models: one module for each family. `vgg.py` makes `--model vgg16`, and adding a family is adding a file.

Options are checked before torch is imported, which takes seconds, so a family's module imports torch in `build` only:

    NAMES             every model's name
    NAME_LIST         the same as text for people
    MIN_IMAGE_SIZE    side of the smallest image that it accepts, in pixels
    HAS_DROPOUT       whether its head has a layer for `--dropout`
    IMAGENET_WEIGHTS  by name, torchvision's model whose weights `--pretrained imagenet` loads
    build(name, classes, scale, dropout) -> Network, where scale(n) is n channels times --width

`layers.py` has what families share, and `pretrained.py` loads weights.
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


def name_lists() -> list[str]:
    """The names of the models, one text for each family: there are too many to list each."""
    return [family.NAME_LIST for family in families()]


def family(name: str) -> ModuleType:
    """The module of a model's family. UsageError for an unknown name, with the valid ones."""
    for module in families():
        if name in module.NAMES:
            return module
    raise unknown("model", name, name_lists())


def check(name: str, image_size: int, dropout: float, pretrained: str) -> None:
    """UsageError where there is no such model, or one of these options is not for it.

    Args:
        image_size: 0 for that of the data set, which is large enough for every model.
    """
    module = family(name)
    if 0 < image_size < module.MIN_IMAGE_SIZE:
        least = module.MIN_IMAGE_SIZE
        raise UsageError(f"--image-size {image_size} is too small: {name} takes images of at least {least}")
    if dropout and not module.HAS_DROPOUT:
        raise UsageError(f"--dropout does nothing in {name}: its head is one layer")
    if pretrained == "imagenet" and name not in module.IMAGENET_WEIGHTS:
        raise UsageError(f"--pretrained imagenet: {name} is not for ImageNet, and there are no such weights")


def make(name: str, classes: int, width: float = 1.0, dropout: float = 0.0) -> "Network":
    """A model with random weights, drawn from torch's generator.

    Args:
        classes: number of outputs.
        width: factor for the channels and hidden layers of the published model, each of which stays at least 1.
        dropout: its probability, after the hidden layers of the head.
    """
    return family(name).build(name, classes, lambda n: max(1, round(n * width)), dropout)
