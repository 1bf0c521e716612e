"""The optimizers a job can name, on a worker's parameters or on a server's flat shard alike.

Adding one is adding a line to OPTIMIZERS. Names are checked where torch would take too long to import: it is imported
by what computes.
"""

import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.config.run_config import RunConfig

if TYPE_CHECKING:
    import torch

COUNT = "step"  # what Adam and AdamW call the number of updates


@dataclass(frozen=True)
class Kind:
    """
    Attributes:
        name: its class in torch.optim, which works element by element, so that a cut of the weights over servers
            changes no result.
        vectors: how many numbers it keeps for each weight; one that has a momentum keeps it if that is above 0.
        options: those of its arguments that are fields of RunConfig; all have the learning rate and weight decay.
    """

    name: str
    vectors: int
    options: tuple[str, ...] = ()


OPTIMIZERS = {
    "sgd": Kind("SGD", 1, ("momentum", "nesterov")),
    "adam": Kind("Adam", 2),
    "adamw": Kind("AdamW", 2),
}


def vectors_kept(config: RunConfig) -> int:
    """How many numbers the optimizer keeps for each weight."""
    kind = OPTIMIZERS[config.optimizer]
    return kind.vectors if "momentum" not in kind.options or config.momentum else kind.vectors - 1


def make_optimizer(config: RunConfig, parameters: "Iterable[torch.Tensor]") -> "torch.optim.Optimizer":
    """torch.optim's own, fused: one pass over memory."""
    import torch

    kind = OPTIMIZERS[config.optimizer]
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    options |= {name: getattr(config, name) for name in kind.options}
    return _without_compiler(getattr(torch.optim, kind.name))(parameters, **options)


@functools.cache
def _without_compiler(kind: "type[torch.optim.Optimizer]") -> "type[torch.optim.Optimizer]":
    """The same without its hooks for torch.compile, which would have every rank import the compiler: 1.6 s.

    Two methods are what torch's decorators wrap (functools' `__wrapped__`), or as they were if nothing wraps them.
    """
    import torch

    step, add_param_group = inspect.unwrap(kind.step), inspect.unwrap(kind.add_param_group)
    step = torch.no_grad()(step)
    step.hooked = True  # or each step would be recorded for torch's profiler: a third of what a small one takes
    return type(kind.__name__, (kind,), {"step": step, "add_param_group": add_param_group})


def set_lr(optimizer: "torch.optim.Optimizer", lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_of(optimizer: "torch.optim.Optimizer", parameters: "Iterable[torch.Tensor]") -> "dict[str, torch.Tensor]":
    """The optimizer's state of these parameters, on the CPU: whatever has an entry for each of their elements
    as one flat vector, in their order; `step`, a count, as [1].
    """
    import torch

    states = [(p, optimizer.state.get(p, {})) for p in parameters]
    found = {}
    for name in sorted({name for _, state in states for name, value in state.items() if value is not None}):
        if name == COUNT:
            found[name] = torch.tensor([max(float(state[name]) for _, state in states if name in state)])
        else:
            found[name] = torch.cat([s.get(name, torch.zeros_like(p)).detach().flatten().cpu() for p, s in states])
    return found


def restore_state(
    optimizer: "torch.optim.Optimizer", parameters: "Sequence[torch.Tensor]", state: "Mapping[str, torch.Tensor]"
) -> None:
    """Set the optimizer's state to what `state_of` returned for these parameters, however they were cut then.

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
