"""The trained parameters of a model, and their gradients, as one flat float32 vector, in the model's order."""

import torch
from torch import nn


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes: all but the frozen ones."""
    return [p for p in model.parameters() if p.requires_grad]


def payload_bytes(model: nn.Module) -> int:
    """Bytes of the gradients of one backward pass."""
    return sum(p.numel() * p.element_size() for p in trained(model))


def flatten_weights(model: nn.Module) -> torch.Tensor:
    """Move the parameters into one new flat vector [parameters], on their device, and make them views of it."""
    parameters = trained(model)
    flat = torch.empty(sum(p.numel() for p in parameters), device=parameters[0].device)
    for p, view in zip(parameters, _views(flat, parameters), strict=True):
        view.copy_(p.data)
        p.data = view
    return flat


class FlatGradients:
    """A flat vector in CPU memory, pinned where the model is on a GPU, that gradients are staged through.

    Attributes:
        flat: [parameters] float32.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = trained(model)
        on_gpu = self.parameters[0].is_cuda
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), pin_memory=on_gpu)
        self.views = _views(self.flat, self.parameters)

    def gather(self) -> None:
        """Copy every parameter's gradient into the vector."""
        for view, p in zip(self.views, self.parameters, strict=True):
            assert p.grad is not None
            view.copy_(p.grad, non_blocking=True)
        if self.parameters[0].is_cuda:
            torch.cuda.current_stream().synchronize()

    def scatter(self) -> None:
        """Copy the vector back into the gradients."""
        for view, p in zip(self.views, self.parameters, strict=True):
            assert p.grad is not None
            p.grad.copy_(view, non_blocking=True)


def _views(flat: torch.Tensor, like: list[nn.Parameter]) -> list[torch.Tensor]:
    pieces = flat.split([p.numel() for p in like])
    return [piece.view(p.shape) for piece, p in zip(pieces, like, strict=True)]
