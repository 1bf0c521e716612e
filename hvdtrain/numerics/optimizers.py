"""The optimizers a job can name, on a worker's parameters or on a server's flat shard alike.

Adding one of torch.optim's that works element by element is adding a line to OPTIMIZERS. Names are checked where torch
would take too long to import: it is imported by what computes.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.config.run_config import RunConfig

if TYPE_CHECKING:
    import torch

COUNT = "step"  # what Adam and AdamW call the number of updates


@dataclass(frozen=True)
class OptimizerSpec:
    """
    Attributes:
        name: its class in torch.optim, which works element by element, so that a cut of the weights over servers
            changes no result.
        vectors: how many numbers it keeps for each weight; one that has a momentum keeps it if that is above 0.
        options: those of its arguments that are fields of RunConfig; all have the learning rate and weight decay.
        kernel: of torch, "sgd" or "adam", that takes the step of a server's bucket; empty where its own method does.
    """

    name: str
    vectors: int
    options: tuple[str, ...] = ()
    kernel: str = ""


OPTIMIZERS = {
    "sgd": OptimizerSpec("SGD", 1, ("momentum", "nesterov"), kernel="sgd"),
    "adam": OptimizerSpec("Adam", 2, kernel="adam"),
    "adamw": OptimizerSpec("AdamW", 2, kernel="adam"),
}


def vectors_kept(config: RunConfig) -> int:
    """How many numbers the optimizer keeps for each weight."""
    spec = OPTIMIZERS[config.optimizer]
    return spec.vectors if "momentum" not in spec.options or config.momentum else spec.vectors - 1


def make_optimizer(config: RunConfig, parameters: "Iterable[torch.Tensor]") -> "torch.optim.Optimizer":
    """torch.optim's own, fused where that is to be had: one pass over memory."""
    spec = OPTIMIZERS[config.optimizer]
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    return _make(spec, parameters, options | {name: getattr(config, name) for name in spec.options})


def make_outer_optimizer(
    config: RunConfig, parameters: "Iterable[torch.Tensor]", workers: int
) -> "torch.optim.Optimizer":  # fmt: skip
    """What takes Δ of --local-steps as a gradient. Torch's SGD does v ← βv + Δ; θ ← θ - η(Δ + βv), or θ ← θ - ηv
    without Nesterov's look ahead (Sutskever et al., 2013, section 2, as torch writes it).
    """
    lr, momentum = config.taken_outer(workers)
    nesterov = config.outer == "nesterov" and momentum > 0
    return _make(OPTIMIZERS["sgd"], parameters, {"lr": lr, "momentum": momentum, "nesterov": nesterov})


def make_exchange_optimizer(
    config: RunConfig, parameters: "Iterable[torch.Tensor]", workers: int
) -> "torch.optim.Optimizer":  # fmt: skip
    """What takes that which workers exchange: gradients, or Δ of --local-steps."""
    if config.local_steps:
        return make_outer_optimizer(config, parameters, workers)
    return make_optimizer(config, parameters)


def _make(
    spec: OptimizerSpec, parameters: "Iterable[torch.Tensor]", options: dict[str, Any]
) -> "torch.optim.Optimizer":  # fmt: skip
    import torch

    optimizer = getattr(torch.optim, spec.name)
    if "fused" in inspect.signature(optimizer).parameters:
        options["fused"] = True
    return _without_compiler(optimizer, spec.kernel)(parameters, **options)


@functools.cache
def _without_compiler(kind: "type[torch.optim.Optimizer]", kernel: str) -> "type[torch.optim.Optimizer]":
    """The same without its hooks for torch.compile, which would have every rank import the compiler: 1.6 s.

    Two methods are what torch's decorators wrap (functools' `__wrapped__`), or as they were if nothing wraps them.
    """
    import torch

    whole, add_param_group = torch.no_grad()(inspect.unwrap(kind.step)), inspect.unwrap(kind.add_param_group)

    def step(self: "torch.optim.Optimizer", closure: Callable[[], float] | None = None) -> float | None:
        """As torch's own. That of a server's bucket, a flat tensor whose optimizer has its state, is the one kernel
        that torch calls too: what torch does around it, for any number of tensors on any devices, takes longer than the
        kernel itself where the bucket is small.
        """
        group = self.param_groups[0]
        weights, momentum = group["params"][0], group.get("momentum", 0.0)
        gradient, state = weights.grad, self.state.get(weights, {})
        needed = "exp_avg" if kernel == "adam" else "momentum_buffer" if momentum else None
        is_flat = len(self.param_groups) == 1 and len(group["params"]) == 1 and not weights.requires_grad
        if not (kernel and is_flat) or closure or gradient is None or (needed and needed not in state):
            return whole(self, closure)
        if kernel == "sgd":
            torch._fused_sgd_(
                [weights], [gradient], [state[needed]] if needed else [], weight_decay=group["weight_decay"],
                lr=group["lr"], momentum=momentum, dampening=group["dampening"], nesterov=group["nesterov"],
                maximize=False, is_first_step=False,
            )  # fmt: skip
            return None
        state["step"] += 1
        beta1, beta2 = group["betas"]
        update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        update(
            [weights], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]], lr=group["lr"],
            beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False,
            maximize=False,
        )  # fmt: skip
        return None

    # Or each step would be recorded for torch's profiler: a third of what a small one takes.
    setattr(step, "hooked", True)  # noqa: B010
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
    """Set the optimizer's state to what `state_of` returned for these parameters, however they were cut then. A name
    with a dot is not of the optimizer.

    Raises:
        ValueError: it is not of so many elements.
    """
    total = sum(p.numel() for p in parameters)
    state = {name: values for name, values in state.items() if "." not in name}
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
    elif config.falls_as_cosine and steps:
        how = f"cosine over {steps} steps"
    else:
        how = "constant"
    return f"{how}, warm-up over {config.warm_up_steps}" if config.warm_up_steps else how


def lr_at(config: RunConfig, step: int, epoch: int, steps: int | None) -> float:
    """The learning rate of a step and its epoch (from 1) of `steps`, or of nobody knows how many (None).

    `cosine` falls from lr to nearly 0 (Loshchilov & Hutter, 2017, arXiv:1608.03983, eq. 5, without restarts). Warm-up
    multiplies it by step / warmup in the first steps (Goyal et al., 2017, arXiv:1706.02677, section 2.2).
    """
    warm = min(1.0, step / (config.warm_up_steps or 1))
    if config.schedule == "step":
        return warm * config.lr * config.step_factor ** ((epoch - 1) // config.step_epochs)
    if config.falls_as_cosine and steps:
        return warm * config.lr * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
    return warm * config.lr
