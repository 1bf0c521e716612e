"""VGG (Simonyan & Zisserman, 2015, arXiv:1409.1556, table 1) and VGG-F.

Models have any width, and take images of any size >= 32. Parameters have torchvision's names, so
that torchvision's weights load.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.models.layers import Network

PUBLISHED = [
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
]
NAMES = [*PUBLISHED, "vggf"]
NAME_LIST = ", ".join(NAMES)
MIN_IMAGE_SIZE = 32  # images are halved five times
HAS_DROPOUT = True
IMAGENET_WEIGHTS = {name: name for name in PUBLISHED} | {"vggf": "vgg16"}

# Convolutions before each of the five poolings, and their channels: the paper's columns A, B, D and
# E. torchvision has the networks too, but importing it would cost every rank more than a second and
# 200 MB.
DEPTHS = {
    "11": (1, 1, 2, 2, 2),
    "13": (2, 2, 2, 2, 2),
    "16": (2, 2, 3, 3, 3),
    "19": (2, 2, 4, 4, 4),
}
CHANNELS = (64, 128, 256, 512, 512)

# VGG-F is VGG-16 with two more layers between the last hidden layer and the classes, which get
# narrower like a funnel (github.com, "Distributed VGG-F", which gives no widths). Here each has a
# quarter of the width of the layer before.
FUNNEL = (1024, 256)


def build(name: str, classes: int, scale: Callable[[int], int], dropout: float) -> "Network":
    """Builds a VGG, with dropout after the two wide layers of the head."""
    from torch import nn

    from hvdtrain.models.layers import Network, he_weights

    base = "vgg16" if name == "vggf" else name
    has_norm = base.endswith("_bn")
    depths = DEPTHS[base.removeprefix("vgg").removesuffix("_bn")]
    features: list[nn.Module] = []
    inputs = 3
    for depth, channels in zip(depths, map(scale, CHANNELS), strict=True):
        for _ in range(depth):
            features.append(nn.Conv2d(inputs, channels, kernel_size=3, padding=1))
            if has_norm:
                features.append(nn.BatchNorm2d(channels))
            features.append(nn.ReLU(inplace=True))
            inputs = channels
        features.append(nn.MaxPool2d(2))
    hidden = scale(4096)
    head: list[nn.Module] = []
    for inputs in (scale(512) * 7 * 7, hidden):
        head += [nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)]
    if name == "vggf":
        for outputs in map(scale, FUNNEL):
            head += [nn.Linear(hidden, outputs), nn.ReLU(inplace=True)]
            hidden = outputs
    return he_weights(Network(features, 7, [*head, nn.Linear(hidden, classes)]))
