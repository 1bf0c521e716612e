"""Computing layers in numbers of 16 bits."""

import contextlib

import torch


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Layers in 16 bits with `bf16`; weights, gradients and optimizer stay float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
