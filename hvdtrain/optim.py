"""The optimizers a job can name, on a worker's parameters or on a server's flat shard alike."""

import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.config import RunConfig

COUNT = "step"  # what Adam and AdamW call the number of updates


def make_optimizer(config: RunConfig, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """torch.optim's own, fused: one pass over memory. All work element by element, so a cut of the weights
    over servers changes no result."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.optimizer == "sgd":
        options |= {"momentum": config.momentum, "nesterov": config.nesterov}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return _without_compiler(kind)(parameters, **options)


@functools.cache
def _without_compiler(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same, but for what it tells torch.compile: to tell it nothing, every rank would import 1.6 s of compiler.

    Two methods are what torch's decorators wrap (functools' `__wrapped__`), or as they were if nothing wraps them.
    """
    step, add_param_group = inspect.unwrap(kind.step), inspect.unwrap(kind.add_param_group)
    return type(kind.__name__, (kind,), {"step": torch.no_grad()(step), "add_param_group": add_param_group})


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_of(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the optimizer remembers of these parameters, on the CPU: whatever has an entry for each of their elements
    as one flat vector, in their order; `step`, a count, as [1].
    """
    states = [(p, optimizer.state.get(p, {})) for p in parameters]
    found = {}
    for name in sorted({name for _, state in states for name, value in state.items() if value is not None}):
        if name == COUNT:
            found[name] = torch.tensor([max(float(state[name]) for _, state in states if name in state)])
        else:
            found[name] = torch.cat([s.get(name, torch.zeros_like(p)).detach().flatten().cpu() for p, s in states])
    return found


def restore_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]
) -> None:
    """Have the optimizer remember what `state_of` gave for these parameters, however they were cut then.

    Raises:
        ValueError: it is not of so many elements.
    """
    total = sum(p.numel() for p in parameters)
    for name, values in state.items():
        if name != COUNT and len(values) != total:
            raise ValueError(f"{name} has {len(values):,} elements for {total:,} weights")
    start = 0
    for p in parameters:
        own = {name: values[start : start + p.numel()].view(p.shape) for name, values in state.items() if name != COUNT}
        if COUNT in state:
            own[COUNT] = state[COUNT][0]
        if own:
            optimizer.state[p] = {name: values.to(p.device, copy=True) for name, values in own.items()}
        start += p.numel()


def schedule(config: RunConfig, steps: int | None) -> str:
    """How lr_at goes on over so many steps, in words: equal words, equal learning rates."""
    if config.schedule == "step":
        how = f"times {config.step_factor:g} every {config.step_epochs} epochs"
    elif config.schedule == "constant" or steps is None:
        how = "constant"
    else:
        how = f"{config.schedule} over {steps} steps"
    return f"{how}, warm-up over {config.warmup}" if config.warmup else how


def lr_at(config: RunConfig, step: int, epoch: int, steps: int | None) -> float:
    """The learning rate of a step and its epoch (from 1) of `steps`, or of nobody knows how many (None).

    `cosine` falls from lr to nearly 0 (Loshchilov & Hutter, 2017, arXiv:1608.03983, eq. 5, without restarts). Warm-up
    multiplies it by step / warmup in the first steps (Goyal et al., 2017, arXiv:1706.02677, section 2.2).
    """
    warm = min(1.0, step / config.warmup) if config.warmup else 1.0
    if config.schedule == "step":
        return warm * config.lr * config.step_factor ** ((epoch - 1) // config.step_epochs)
    if config.schedule == "constant" or steps is None:
        return warm * config.lr
    return warm * config.lr * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
