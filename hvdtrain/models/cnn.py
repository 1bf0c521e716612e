"""The network of SINGA's distributed-training example on MNIST: two convolutions, each with a pooling, and two layers.

The original takes 28x28 grey images. This one takes three channels, as all models here do, and larger images: their
maps are averaged to the 4x4 that 28x28 gives. Its initial weights are torch's defaults: with those of He et al., which
deep networks need, SGD diverges from a learning rate of 0.02 on digits, most of whose pixels are far from the mean that
is subtracted.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.models.layers import Network

NAMES = ["cnn"]
NAME_LIST = "cnn"
MIN_IMAGE_SIZE = 28
HAS_DROPOUT = True
IMAGENET_WEIGHTS: dict[str, str] = {}

GRID = 4  # 28 pixels, less 4, halved, less 4, halved


def build(name: str, classes: int, scale: Callable[[int], int], dropout: float) -> "Network":
    from torch import nn

    from hvdtrain.models.layers import Network

    first, second, hidden = scale(20), scale(50), scale(500)
    features = [
        nn.Conv2d(3, first, kernel_size=5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(first, second, kernel_size=5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    ]  # fmt: skip
    head = [
        nn.Linear(second * GRID * GRID, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(hidden, classes)
    ]  # fmt: skip
    return Network(features, GRID, head)
