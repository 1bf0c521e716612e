"""The layers of networks that published tables name: sizes, and shares of computing by their multiplications."""

from functools import partial
from typing import Any

from hvdtrain.errors import UsageError

SIDE = {"inception_v3": 299}  # pixels; 224 for the others


def layers_of(name: str) -> list[tuple[str, float, float]]:
    """(name, megabytes of float32, share of computing) of each layer with parameters, in the order of forward.

    As torchvision has the network for ImageNet's 1,000 classes, without auxiliary heads. A share is the layer's part of
    all multiplications: a coarse guess, since small layers take longer than these say, and batch norm has none.

    Raises:
        UsageError: torchvision has none of that name.
    """
    import torch
    import torchvision

    if name not in torchvision.models.list_models(torchvision.models):
        raise UsageError(
            f"unknown model '{name}': torchvision's names are known, vgg16 or resnet50; or write layers = […]"
        )
    more = {"aux_logits": False, "init_weights": False} if name in ("inception_v3", "googlenet") else {}
    layers: list[tuple[str, float, float]] = []

    def note(label: str, module: torch.nn.Module, _: Any, output: torch.Tensor) -> None:
        parameters = list(module.parameters(recurse=False))
        weights = sum(p.numel() for p in parameters if p.dim() > 1)
        positions = output.numel() / output.shape[1]
        layers.append((label, sum(p.numel() for p in parameters) * 4e-6, weights * positions))

    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, **more).eval()
        for label, module in model.named_modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_hook(partial(note, label))
        side = SIDE.get(name, 224)
        model(torch.zeros(1, 3, side, side))
    total = sum(work for _, _, work in layers)
    return [(label, size, work / total) for label, size, work in layers]
