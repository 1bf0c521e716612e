"""Computing layers in numbers of 16 bits: which, and what fp16's small range asks for."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Layers in 16 bits with `bf16` and `fp16`; weights, gradients and optimizer stay float32."""
    if precision not in HALVES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=HALVES[precision])


class LossScale:
    """For fp16: the loss is multiplied, so that small gradients do not vanish, and steps that overflow are left out.

    Dynamic loss scaling (Micikevicius et al., 2018, arXiv:1710.03740, section 3.2) by torch's GradScaler: the scale
    is halved after a step that is left out, and doubled after 2,000 that are not. Otherwise it does nothing. After an
    all-reduce all workers see the same gradients, and have the same scale; workers of servers each have their own.

    GradScaler gives a fused optimizer the gradients that overflowed, for it to leave them alone; torch 2.15's SGD then
    takes momentum from memory that was never written, if that is its first step. Here it is asked about gradients
    alone, and the optimizer sees none that overflowed.

    Attributes:
        acted: whether the last step was taken, and not left out.
    """

    def __init__(self, precision: str, parameters: Iterable[torch.Tensor], device: torch.device) -> None:
        self.enabled = precision == "fp16"
        self.acted = True
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.enabled)
        self._gradients = _Gradients(parameters) if self.enabled else None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""
        return self._scaler.scale(loss)

    def step(self, act: Callable[[], Any]) -> None:
        """Divide the gradients by the scale, and act on them unless one has overflowed."""
        if self._gradients:
            self._gradients.finite = False
            self._scaler.step(self._gradients)
            self._scaler.update()
            self.acted = self._gradients.finite
        if self.acted:
            act()

    def state(self) -> dict[str, float]:
        return self._scaler.state_dict()

    def restore(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self._scaler.load_state_dict(state)


class _Gradients(torch.optim.Optimizer):
    """What GradScaler takes for an optimizer: it learns whether the gradients are finite."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.finite = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.finite = True
