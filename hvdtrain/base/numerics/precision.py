"""Computing layers in 16 bits."""

import contextlib

import torch


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Returns a context that computes layers in 16 bits with `bf16`, and does nothing otherwise.

    Weights, gradients and optimizer stay float32.
    """
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
