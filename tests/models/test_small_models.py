"""The models for small images: their layers by the papers' tables, and how they take what all
models take.
"""

import pytest
import torch
from torch import nn

from hvdtrain.models import make
from hvdtrain.models.layers import ResidualBlock

pytestmark = pytest.mark.usefixtures("one_thread")


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)]
)
def test_resnets_have_the_papers_depth_and_parameters(depth, millions):
    """He et al., table 6."""
    with torch.device("meta"):
        model = make(f"resnet{depth}", 10)
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == depth
    assert parameters(model) / 1e6 == pytest.approx(millions, abs=0.06 if depth == 110 else 0.006)


def test_a_block_that_adds_nothing_lets_its_input_through():
    maps = torch.arange(1, 3 * 4 * 4 + 1.0).view(1, 3, 4, 4)
    for block, expected in (
        (ResidualBlock(3, 3, 1), maps),
        (ResidualBlock(3, 5, 2), maps[:, :, ::2, ::2]),
    ):
        nn.init.zeros_(block.conv2.weight)
        outputs = block(maps)
        assert torch.equal(outputs[:, :3], expected)
        assert not outputs[:, 3:].any()


def test_cnn_is_the_references_network_with_three_input_channels():
    model = make("cnn", 10)
    layers = [layer for layer in model.features if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size, c.padding) for c in layers] == [
        (3, 20, (5, 5), (0, 0)),
        (20, 50, (5, 5), (0, 0)),
    ]
    assert [
        (m.in_features, m.out_features) for m in model.classifier if isinstance(m, nn.Linear)
    ] == [
        (4 * 4 * 50, 500),
        (500, 10),
    ]
    # as the network has them
    images = torch.randn(2, 3, 28, 28).contiguous(memory_format=torch.channels_last)
    maps = model.features(images)  # averaging to the grid is nothing there
    assert torch.equal(model(images), model.classifier(maps.flatten(1)))


def test_a_width_near_zero_leaves_one_channel_and_all_classes():
    least = make("cnn", 10, 1e-9)
    assert [m.out_channels for m in least.modules() if isinstance(m, nn.Conv2d)] == [1, 1]
    assert least.classifier[-1].out_features == 10


@pytest.mark.parametrize("name", ["vggf", "vgg11_bn", "cnn", "resnet8"])
def test_every_parameter_is_the_bodys_or_the_heads(name):
    model = make(name, 3, 1 / 16)
    names = [name for name, _ in model.named_parameters()]
    head = [name for name in names if name.startswith("classifier.")]
    assert head and all(name.startswith("features.") for name in names if name not in head)
    model.features.requires_grad_(False)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == head
