"""Models: one module for each family. `vgg.py` makes `--model vgg16`; a new family is a new file.

Options are checked before torch is imported, which takes seconds. So a family's module imports
torch in `build` only. It has:

    NAMES             the names of all models
    NAME_LIST         the names as text for people
    MIN_IMAGE_SIZE    the side of the smallest image that the models accept, in pixels
    HAS_DROPOUT       whether the head has a layer for `--dropout`
    IMAGENET_WEIGHTS  by name, torchvision's model with the weights for `--pretrained imagenet`
    build(name, classes, scale, dropout) -> Network, where scale(n) is n channels times --width

`layers.py` has the layers that families share, `pretrained.py` loads weights, and `checkpoint.py`
finds them in a file.

`own.py` loads other models. `--model ./my_model.py:build` or `package.module:build` calls a
function with the number of classes (and, where it takes arguments of these names, `image_size` and
`channels`). It returns an nn.Module, from a batch to scores [batch, classes].
`torchvision.models:resnet18` is such a function; `timm:resnet18` is a model of timm, where that is
installed. The module is tried before it is trained. Parameters may be shared, frozen or lazy, and
buffers integers. The manifest has the hash of the file as `model_hash`: of that file alone, not of
modules that it imports.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hvdtrain.base.errors import UsageError, unknown
from hvdtrain.base.system.own_code import TIMM, is_code

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvdtrain.models.layers import Network

_SHARED = {"__init__", "checkpoint", "layers", "own", "pretrained"}  # not families


def families() -> list[ModuleType]:
    """Imports the modules of all families, sorted by name."""
    stems = {path.stem for path in Path(__file__).parent.glob("*.py")}
    return [importlib.import_module(f"hvdtrain.models.{stem}") for stem in sorted(stems - _SHARED)]


def name_lists() -> list[str]:
    """Returns the names that `--model` takes, one text for each family and kind of other models."""
    of_families = [family.NAME_LIST for family in families()]
    return [*of_families, "FILE.py:FUNCTION", "torchvision.models:NAME", f"{TIMM}NAME"]


def is_own(name: str) -> bool:
    """Returns whether a model is of no family here: a user's function or timm makes it."""
    return name.startswith(TIMM) or is_code(name)


def family(name: str) -> ModuleType:
    """Returns the module of a model's family.

    Raises:
        UsageError: There is no such model. The message lists the names.
    """
    for module in families():
        if name in module.NAMES:
            return module
    if name.endswith(".py"):
        raise UsageError(f"--model {name} names no function: give {name}:build, say")
    raise unknown("model", name, name_lists())


def check(name: str, image_size: int, dropout: float, pretrained: str) -> None:
    """Checks that a model exists, and that options are for it.

    Args:
        name: The name of the model.
        image_size: The side of images; 0 for that of the data set, which is large enough for every
            model.
        dropout: The probability of dropout.
        pretrained: The value of `--pretrained`.

    Raises:
        UsageError: There is no such model, or one of the options is not for it.
    """
    if is_own(name):
        if pretrained == "imagenet":
            raise UsageError(
                f"--pretrained imagenet is for VGGs: have {name} load its weights, or give a file "
                "of them"
            )
        return
    module = family(name)
    if 0 < image_size < module.MIN_IMAGE_SIZE:
        least = module.MIN_IMAGE_SIZE
        raise UsageError(
            f"--image-size {image_size} is too small: {name} takes images of at least {least}"
        )
    if dropout and not module.HAS_DROPOUT:
        raise UsageError(f"--dropout does nothing in {name}: its head is one layer")
    if pretrained == "imagenet" and name not in module.IMAGENET_WEIGHTS:
        raise UsageError(
            f"--pretrained imagenet: {name} is not for ImageNet, and there are no such weights"
        )


def make(
    name: str,
    classes: int,
    width: float = 1.0,
    dropout: float = 0.0,
    inputs: "Tensor | None" = None,
) -> "nn.Module":
    """Makes a model with random weights, drawn from torch's generator.

    Args:
        name: The name of the model.
        classes: The number of outputs.
        width: The factor for the channels and hidden layers of the published model. Each keeps at
            least one.
        dropout: The probability of dropout after the hidden layers of the head.
        inputs: Two samples, [2, …], to try the model with. A user's own model needs them, and a
            user's own data; None for images and a model of a family.

    Raises:
        UsageError: The model cannot be trained on such samples.
    """
    if inputs is None:
        return _build(name, classes, width, dropout)
    from hvdtrain.models.own import make_own, tried

    if is_own(name):
        return make_own(name, classes, inputs)
    model = _build(name, classes, width, dropout)
    if inputs.ndim != 4:
        raise UsageError(
            f"{name} takes images, and these samples are {list(inputs.shape[1:])}: "
            "give --model for them"
        )
    return tried(name, model, inputs, classes)


def _build(name: str, classes: int, width: float, dropout: float) -> "Network":
    """Builds a model of a family."""

    def scale(channels: int) -> int:
        return max(1, round(channels * width))

    return family(name).build(name, classes, scale, dropout)
