"""The trained parameters of a model as one flat float32 vector, in the model's order."""

import torch
from torch import nn


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that training changes, which are all but the frozen ones."""
    return [p for p in model.parameters() if p.requires_grad]


def payload_bytes(model: nn.Module) -> int:
    """Returns the bytes of the gradients of one backward pass."""
    return sum(p.numel() * p.element_size() for p in trained(model))


def flatten_weights(model: nn.Module) -> torch.Tensor:
    """Moves the parameters into one new flat vector on their device, and makes them views of it.

    Returns:
        The vector, [elements of all parameters].
    """
    parameters = trained(model)
    flat = torch.empty(sum(p.numel() for p in parameters), device=parameters[0].device)
    for p, view in zip(parameters, views(flat, parameters), strict=True):
        view.copy_(p.data)
        p.data = view
    return flat


def views(flat: torch.Tensor, like: list[nn.Parameter]) -> list[torch.Tensor]:
    """Returns the parts of a flat vector that belong to the parameters, in their shapes."""
    pieces = flat.split([p.numel() for p in like])
    return [piece.view(p.shape) for piece, p in zip(pieces, like, strict=True)]
