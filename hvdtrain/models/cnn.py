"""The network of SINGA's distributed-training example on MNIST.

It has two convolutions, each followed by a pooling, and two linear layers. The original takes 28x28
grey images. This network takes three channels, as all models here do, and larger images: maps are
averaged to the 4x4 that 28x28 gives. Initial weights are torch's defaults. With those of He et al.,
which deep networks need, SGD diverges on digits at a learning rate of 0.02: most pixels are far
from the mean that is subtracted.
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
    """Builds the network, with dropout after the hidden layer."""
    from torch import nn

    from hvdtrain.models.layers import Network

    first = scale(20)
    second = scale(50)
    hidden = scale(500)
    features = [
        nn.Conv2d(3, first, kernel_size=5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, kernel_size=5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    ]
    head = [
        nn.Linear(second * GRID * GRID, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    ]
    return Network(features, GRID, head)
