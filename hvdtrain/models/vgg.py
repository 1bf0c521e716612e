"""VGG (Simonyan & Zisserman, 2015, arXiv:1409.1556, table 1) and VGG-F, at any width and for any image size >= 32.

Parameters are named as in torchvision, so that its weights load.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.models.layers import Network

PUBLISHED = [f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")]
NAMES = [*PUBLISHED, "vggf"]
NAME_LIST = ", ".join(NAMES)
MIN_IMAGE_SIZE = 32  # it is halved five times
HAS_DROPOUT = True
IMAGENET_WEIGHTS = dict(zip(PUBLISHED, PUBLISHED, strict=True)) | {"vggf": "vgg16"}

# Convolutions before each of the five poolings, and their channels: the paper's columns A, B, D and E. torchvision has
# them too, but importing it would cost every rank of every job 1.3 s and 200 MB.
DEPTHS = {"11": (1, 1, 2, 2, 2), "13": (2, 2, 2, 2, 2), "16": (2, 2, 3, 3, 3), "19": (2, 2, 4, 4, 4)}
CHANNELS = (64, 128, 256, 512, 512)

# VGG-F is VGG-16 with two more layers between the last hidden layer and the classes, which get narrower like a funnel
# (github.com, "Distributed VGG-F", which gives no widths). Ours are a quarter of the layer before.
FUNNEL = (1024, 256)


def build(name: str, classes: int, scale: Callable[[int], int], dropout: float) -> "Network":
    """A VGG, with dropout after the two wide layers of its head."""
    from torch import nn

    from hvdtrain.models.layers import Network, he_weights

    base = "vgg16" if name == "vggf" else name
    features: list[nn.Module] = []
    inputs = 3
    for depth, channels in zip(DEPTHS[base.removeprefix("vgg").removesuffix("_bn")], CHANNELS, strict=True):
        for _ in range(depth):
            features.append(nn.Conv2d(inputs, scale(channels), kernel_size=3, padding=1))
            inputs = scale(channels)
            features += [nn.BatchNorm2d(inputs)] if base.endswith("_bn") else []
            features.append(nn.ReLU(inplace=True))
        features.append(nn.MaxPool2d(2))
    hidden = scale(4096)
    head: list[nn.Module] = []
    for inputs in (scale(512) * 7 * 7, hidden):
        head += [nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)]
    for outputs in FUNNEL if name == "vggf" else ():
        head += [nn.Linear(hidden, scale(outputs)), nn.ReLU(inplace=True)]
        hidden = scale(outputs)
    return he_weights(Network(features, 7, [*head, nn.Linear(hidden, classes)]))
