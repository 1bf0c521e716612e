"""Residual networks for small images (He et al., 2016, arXiv:1512.03385, section 4.2).

They have three stages of n blocks, and 6n + 2 layers. MXNet's image-classification example counts
layers in the same way: ResNet-8 has one block in a stage, and ResNet-50 eight. It puts batch norm
and ReLU before convolutions (arXiv:1603.05027); here the order is the original one.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.models.layers import Network

NAMES = [f"resnet{6 * n + 2}" for n in range(1, 201)]  # 1202 layers are the most in the paper
NAME_LIST = "resnet8, resnet14, resnet20 … resnet1202 (6n + 2)"
MIN_IMAGE_SIZE = 28
HAS_DROPOUT = False
IMAGENET_WEIGHTS: dict[str, str] = {}

CHANNELS = (16, 32, 64)  # of the stages; each but the first halves the image


def build(name: str, classes: int, scale: Callable[[int], int], dropout: float) -> "Network":
    """Builds a residual network. There is no dropout."""
    from torch import nn

    from hvdtrain.models.layers import Network, ResidualBlock, he_weights

    blocks = (int(name.removeprefix("resnet")) - 2) // 6
    inputs = scale(CHANNELS[0])
    features: list[nn.Module] = [
        nn.Conv2d(3, inputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
    ]
    for stage, channels in enumerate(map(scale, CHANNELS)):
        for block in range(blocks):
            halves = stage > 0 and block == 0
            features.append(ResidualBlock(inputs, channels, stride=2 if halves else 1))
            inputs = channels
    return he_weights(Network(features, 1, [nn.Linear(inputs, classes)]))
