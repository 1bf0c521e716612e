"""Models: one module for each family. `vgg.py` makes `--model vgg16`, and adding a family is adding a file.

Options are checked before torch is imported, which takes seconds, so a family's module imports torch in `build` only:

    NAMES             every model's name
    NAME_LIST         the same as text for people
    MIN_IMAGE_SIZE    side of the smallest image that it accepts, in pixels
    HAS_DROPOUT       whether its head has a layer for `--dropout`
    IMAGENET_WEIGHTS  by name, torchvision's model whose weights `--pretrained imagenet` loads
    build(name, classes, scale, dropout) -> Network, where scale(n) is n channels times --width

`layers.py` has what families share, and `pretrained.py` loads weights.

`own.py` has models that are not ours: `--model ./my_model.py:build` or `package.module:build` calls a function with the
number of classes (and, where it takes arguments of these names, `image_size` and `channels`), which returns an
nn.Module: from a batch to scores [batch, classes]. `torchvision.models:resnet18` is one, and `timm:resnet18` timm's,
where that is installed. The module is tried before it is trained; parameters may be shared, frozen or lazy, and buffers
integers. The hash of the file is in the manifest, as `model_hash`: of that file alone, not of what it imports.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError, unknown
from hvdtrain.system.own_code import TIMM, is_code

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvdtrain.models.layers import Network

_SHARED = {"__init__", "layers", "own", "pretrained"}  # not families


def families() -> list[ModuleType]:
    stems = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _SHARED)
    return [importlib.import_module(f"hvdtrain.models.{stem}") for stem in stems]


def name_lists() -> list[str]:
    """The names of the models, one text for each family: there are too many to list each; and how others are named."""
    return [*(family.NAME_LIST for family in families()), "FILE.py:FUNCTION", f"{TIMM}NAME"]


def is_own(name: str) -> bool:
    """Whether a model is not one of ours: a user's function makes it, or timm."""
    return name.startswith(TIMM) or is_code(name)


def family(name: str) -> ModuleType:
    """The module of a model's family. UsageError for an unknown name, with the valid ones."""
    for module in families():
        if name in module.NAMES:
            return module
    if name.endswith(".py"):
        raise UsageError(f"--model {name} names no function: give {name}:build, say")
    raise unknown("model", name, name_lists())


def check(name: str, image_size: int, dropout: float, pretrained: str) -> None:
    """UsageError where there is no such model, or one of these options is not for it.

    Args:
        image_size: 0 for that of the data set, which is large enough for every model.
    """
    if is_own(name):
        if pretrained == "imagenet":
            raise UsageError(f"--pretrained imagenet is for VGGs: have {name} load its weights, or give a file of them")
        return
    module = family(name)
    if 0 < image_size < module.MIN_IMAGE_SIZE:
        least = module.MIN_IMAGE_SIZE
        raise UsageError(f"--image-size {image_size} is too small: {name} takes images of at least {least}")
    if dropout and not module.HAS_DROPOUT:
        raise UsageError(f"--dropout does nothing in {name}: its head is one layer")
    if pretrained == "imagenet" and name not in module.IMAGENET_WEIGHTS:
        raise UsageError(f"--pretrained imagenet: {name} is not for ImageNet, and there are no such weights")


def make(
    name: str, classes: int, width: float = 1.0, dropout: float = 0.0, inputs: "Tensor | None" = None
) -> "nn.Module":
    """A model with random weights, drawn from torch's generator; one that is not ours with those that its code draws.

    Args:
        classes: number of outputs.
        width: factor for the channels and hidden layers of the published model, each of which stays at least 1.
        dropout: its probability, after the hidden layers of the head.
        inputs: two samples, [2, …], with which a model is tried: one that is not ours, or one for data that is not.

    Raises:
        UsageError: it cannot be trained on such samples.
    """
    if inputs is None:
        return _ours(name, classes, width, dropout)
    from hvdtrain.models.own import make_own, tried

    if is_own(name):
        return make_own(name, classes, inputs)
    model = _ours(name, classes, width, dropout)
    if inputs.ndim != 4:
        raise UsageError(f"{name} takes images, and these samples are {list(inputs.shape[1:])}: give --model for them")
    return tried(name, model, inputs, classes)


def _ours(name: str, classes: int, width: float, dropout: float) -> "Network":
    return family(name).build(name, classes, lambda n: max(1, round(n * width)), dropout)
