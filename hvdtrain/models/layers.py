"""What families of models are made of."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class GridMean(nn.Module):
    """Means over a grid of cells: torch.nn.AdaptiveAvgPool2d, but for --deterministic on a GPU, where that would raise.

    Args:
        grid: maps [n, channels, side, side] become [n, channels, grid, grid]; of a smaller side, cells overlap.
    """

    def __init__(self, grid: int) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        side = maps.shape[-1]
        if side == self.grid:
            return maps
        if not (maps.is_cuda and torch.are_deterministic_algorithms_enabled()):
            return F.adaptive_avg_pool2d(maps, self.grid)
        return means_by_products(maps, self.grid)


def means_by_products(maps: torch.Tensor, grid: int) -> torch.Tensor:
    """adaptive_avg_pool2d of square maps as products of matrices, which repeat to the bit."""
    share = _shares(maps.shape[-1], grid, maps.device, maps.dtype)
    return share @ maps @ share.T


@functools.cache
def _shares(side: int, grid: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What each of `side` pixels counts in the mean of each of `grid` cells, [grid, side]."""
    with torch.inference_mode(False):  # it is kept for training, whoever asks first
        share = torch.zeros(grid, side, dtype=dtype)
        for cell in range(grid):
            first, end = cell * side // grid, -(-(cell + 1) * side // grid)
            share[cell, first:end] = 1 / (end - first)
        return share.to(device)


class Network(nn.Module):
    """A body of convolutions, means over a grid, and a head; images of [n, 3, height, width] float32.

    Parameters of the body are named `features.…` and those of the head `classifier.…`, in every model.

    Args:
        features: from images to [n, channels, height, width].
        grid: these maps are averaged to [n, channels, grid, grid].
        classifier: from [n, channels * grid * grid] to class scores.
    """

    def __init__(self, features: Sequence[nn.Module], grid: int, classifier: Sequence[nn.Module]) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.avgpool = GridMean(grid)
        self.classifier = nn.Sequential(*classifier)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores [n, classes]."""
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))


def he_weights(network: Network) -> Network:
    """Draw the weights of convolutions and linear layers as a deep network needs them, and return it.

    torchvision gives VGG's linear layers a fixed deviation of 0.01, right for 4096 inputs alone; He et al. (2015,
    arXiv:1502.01852, eq. 10) gives the same signal at every width, depth and through a funnel.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, around which their input goes on unchanged (arXiv:1512.03385, fig. 2).

    Where the block halves the image and has more channels, every other pixel of the input is taken and channels of
    zeros are added: option A there, which has no parameters.

    Args:
        inputs, outputs: channels; outputs >= inputs.
        stride: 2 halves height and width.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, outputs - inputs

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(maps)))))
        if self.stride > 1:
            maps = F.pad(maps[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return F.relu(branch + maps)
