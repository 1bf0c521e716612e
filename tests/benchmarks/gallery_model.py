"""A small vision transformer for gallery.py: `--model tests/benchmarks/gallery_model.py:transformer`."""

import torch
from torch import nn

PATCH = 8
CHANNELS = 256
LAYERS = 6


class Transformer(nn.Module):
    """An encoder over the patches of an image, and a linear layer over the mean of its outputs."""

    def __init__(self, classes: int, image_size: int, channels: int) -> None:
        super().__init__()
        patches = (image_size // PATCH) ** 2
        self.embed = nn.Conv2d(channels, CHANNELS, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches, CHANNELS))
        layer = nn.TransformerEncoderLayer(
            CHANNELS, nhead=4, dim_feedforward=4 * CHANNELS, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(CHANNELS, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, classes], of images, [batch, channels, size, size]."""
        words = self.embed(images).flatten(2).transpose(1, 2)
        encoded = self.layers(words + self.positions)
        return self.head(encoded.mean(dim=1))


def transformer(classes: int, image_size: int, channels: int) -> nn.Module:
    """Returns the transformer, which has 4.8 million weights for images of 64 pixels."""
    return Transformer(classes, image_size, channels)
