"""Layers that families of models share."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class GridAveragePool(nn.Module):
    """torch.nn.AdaptiveAvgPool2d that also runs with --deterministic on a GPU.

    Args:
        grid: The side of the output: maps [n, channels, side, side] become [n, channels, grid,
            grid]. Cells overlap if side < grid.
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
        return average_pool_by_matmul(maps, self.grid)


def average_pool_by_matmul(maps: torch.Tensor, grid: int) -> torch.Tensor:
    """Returns adaptive_avg_pool2d of square maps, by matrix products, which are deterministic."""
    weights = _averaging_weights(maps.shape[-1], grid, maps.device, maps.dtype)
    return weights @ maps @ weights.T


@functools.cache
def _averaging_weights(
    side: int, grid: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the weight of each pixel in the mean of each cell, [grid, side]."""
    # The cached tensor is used in training too, which a tensor of inference mode cannot be.
    with torch.inference_mode(False):
        weights = torch.zeros(grid, side, dtype=dtype)
        for cell in range(grid):
            first = cell * side // grid
            end = -(-(cell + 1) * side // grid)
            weights[cell, first:end] = 1 / (end - first)
        return weights.to(device)


class Network(nn.Module):
    """Convolutions, average pooling to a grid, and a head.

    In every model the names of the convolutions' parameters begin with `features.`, and those of
    the head's with `classifier.`.

    Args:
        features: Modules from images to maps [n, channels, height, width].
        grid: The side to which maps are averaged, [n, channels, grid, grid].
        classifier: Modules from [n, channels * grid * grid] to class scores.
    """

    def __init__(
        self, features: Sequence[nn.Module], grid: int, classifier: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.avgpool = GridAveragePool(grid)
        self.classifier = nn.Sequential(*classifier)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns class scores [n, classes] of images [n, 3, height, width] float32."""
        # oneDNN convolves few channels faster if the channels of a pixel lie side by side.
        if not images.is_cuda:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))


def he_weights(network: Network) -> Network:
    """Draws weights as He et al. (2015, arXiv:1502.01852, eq. 10) do; returns the network.

    The signal then has the same variance after every layer of any width. torchvision gives VGG's
    linear layers a fixed deviation of 0.01, which is right for 4096 inputs only.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut around them (arXiv:1512.03385, fig. 2).

    If the block halves the image and has more channels, the shortcut takes every other pixel and
    adds channels of zeros: option A in the paper, which has no parameters.

    Args:
        inputs: Input channels.
        outputs: Output channels, at least as many as `inputs`.
        stride: The stride of the first convolution; 2 halves height and width.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.added_channels = outputs - inputs

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(maps)))))
        if self.stride > 1:
            maps = maps[:, :, :: self.stride, :: self.stride]
            maps = F.pad(maps, (0, 0, 0, 0, 0, self.added_channels))
        return F.relu(branch + maps)
