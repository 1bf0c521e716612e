"""Models without kinks, to check that two trainings compute the same.

The gradient of ReLU jumps where its input is 0, and the gradient of a maximum where two inputs are
equal. Near a jump rounding decides on which side an input lies, and rounding depends on a
processor's vector units and on how many samples are computed at a time. Then the gradient of a
whole sample changes, and not only its last digits: by as much as the errors that a check looks for.
Where gradients are continuous, only rounding is left.
"""

from typing import TYPE_CHECKING

from hvdtrain import models

if TYPE_CHECKING:
    from torch import nn

WIDTH = 1 / 16


def vgg(classes: int) -> "nn.Module":
    """Returns a VGG-F of WIDTH without kinks, for images [n, 3, height, width] float32."""
    return without_kinks(models.make("vggf", classes, WIDTH))


def without_kinks(model: "nn.Module") -> "nn.Module":
    """Replaces ReLU and max-pooling modules by ELU and average pooling; returns the model.

    ELU is of Clevert et al. (2016, arXiv:1511.07289). Functions that forward calls are not
    replaced.
    """
    from torch import nn

    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.ReLU):
            model.set_submodule(name, nn.ELU())
        elif isinstance(layer, nn.MaxPool2d):
            model.set_submodule(name, nn.AvgPool2d(layer.kernel_size, layer.stride, layer.padding))
    return model
