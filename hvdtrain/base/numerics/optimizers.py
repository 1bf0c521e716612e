"""Optimizers, for a worker's parameters and for a server's flat bucket alike.

To add one of torch.optim that works element by element, add a line to OPTIMIZERS, or for
--local-steps to OUTER_OPTIMIZERS. Names are checked without importing torch, which takes long.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.base.config.run_config import WARM_UP, OuterSettings, RunConfig

if TYPE_CHECKING:
    import torch

COUNT = "step"  # the name of Adam's and AdamW's count of updates


class Settings(NamedTuple):
    """What one step of a group of parameters is taken with.

    Attributes:
        lr: the learning rate.
        others: other entries of torch's param_groups that may change from step to step.
    """

    lr: float
    others: Mapping[str, Any] = {}


# The learning rate of a step, or the settings of each group of parameters.
StepSettings = float | Sequence[Settings]


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of torch.optim that works element by element.

    Therefore a cut of the weights over servers changes no result.

    Attributes:
        name: the optimizer's class in torch.optim.
        vectors: how many numbers it keeps for each weight. With momentum 0, a momentum is not kept.
        options: its arguments that are fields of RunConfig, beside learning rate and weight decay.
        kernel: torch's kernel, "sgd" or "adam", that takes the step of a server's bucket; empty for
            the class's method.
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


class OuterSpec(NamedTuple):
    """An outer optimizer of --local-steps.

    Attributes:
        kind: of OPTIMIZERS.
        options: returns its arguments beside the learning rate.
    """

    kind: str
    options: Callable[[OuterSettings], dict[str, Any]]


# Torch's SGD does v ← βv + Δ; θ ← θ - η(Δ + βv), or θ ← θ - ηv without Nesterov's look-ahead
# (Sutskever et al., 2013, section 2, as torch writes it).
OUTER_OPTIMIZERS = {
    "nesterov": OuterSpec(
        "sgd", lambda outer: {"momentum": outer.momentum, "nesterov": outer.momentum > 0}
    ),
    "sgd": OuterSpec("sgd", lambda outer: {"momentum": outer.momentum}),
}


# The fields of RunConfig that decide which optimizer there is.
OPTIONS = ("optimizer", "lr", "weight_decay", "momentum", "nesterov")


def vectors_kept(config: RunConfig) -> int:
    """Returns how many numbers the optimizer keeps for each weight."""
    spec = OPTIMIZERS[config.optimizer]
    if "momentum" in spec.options and not config.momentum:
        return spec.vectors - 1
    return spec.vectors


def make_optimizer(
    config: RunConfig, parameters: "Iterable[torch.Tensor]"
) -> "torch.optim.Optimizer":
    """Returns an optimizer of torch.optim, fused if it can be: one pass over memory."""
    spec = OPTIMIZERS[config.optimizer]
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    options |= {name: getattr(config, name) for name in spec.options}
    return _make(spec, parameters, options)


def make_outer_optimizer(
    config: RunConfig, parameters: "Iterable[torch.Tensor]", workers: int
) -> "torch.optim.Optimizer":
    """Returns the outer optimizer, which takes Δ of --local-steps as a gradient."""
    spec = OUTER_OPTIMIZERS[config.outer]
    settings = config.effective_outer(workers)
    options = {"lr": settings.lr} | spec.options(settings)
    return _make(OPTIMIZERS[spec.kind], parameters, options)


def make_exchange_optimizer(
    config: RunConfig, parameters: "Iterable[torch.Tensor]", workers: int
) -> "torch.optim.Optimizer":
    """Returns the optimizer for what workers exchange: gradients, or Δ of --local-steps."""
    if config.local_steps:
        return make_outer_optimizer(config, parameters, workers)
    return make_optimizer(config, parameters)


def _make(
    spec: OptimizerSpec, parameters: "Iterable[torch.Tensor]", options: dict[str, Any]
) -> "torch.optim.Optimizer":
    import torch

    optimizer = getattr(torch.optim, spec.name)
    if "fused" in inspect.signature(optimizer).parameters:
        options["fused"] = True
    return _without_compiler(optimizer, spec.kernel)(parameters, **options)


@functools.cache
def _without_compiler(
    kind: "type[torch.optim.Optimizer]", kernel: str
) -> "type[torch.optim.Optimizer]":
    """Returns the optimizer's class without hooks for torch.compile.

    With them every rank would import the compiler, which takes more than a second. The methods are
    those that torch's decorators wrap (functools' `__wrapped__`).
    """
    import torch

    whole_step = torch.no_grad()(inspect.unwrap(kind.step))

    def step(
        self: "torch.optim.Optimizer", closure: Callable[[], float] | None = None
    ) -> float | None:
        """Takes a step as torch does. For a server's bucket it calls torch's kernel directly.

        A bucket is one flat tensor. What torch does around the kernel, for any number of tensors on
        any devices, takes longer than the kernel if the bucket is small.
        """
        group = self.param_groups[0]
        weights = group["params"][0]
        gradient = weights.grad
        state = self.state.get(weights, {})
        is_flat = (
            len(self.param_groups) == 1 and len(group["params"]) == 1 and not weights.requires_grad
        )
        if not is_flat or closure or gradient is None:
            return whole_step(self, closure)
        if kernel == "sgd" and (not group["momentum"] or "momentum_buffer" in state):
            _sgd_kernel(weights, gradient, group, state)
        elif kernel == "adam" and "exp_avg" in state:
            _adam_kernel(weights, gradient, group, state)
        else:
            return whole_step(self, closure)
        return None

    # Without this each step is recorded for torch's profiler, which takes a third of a small step.
    setattr(step, "hooked", True)  # noqa: B010
    methods = {"step": step, "add_param_group": inspect.unwrap(kind.add_param_group)}
    return type(kind.__name__, (kind,), methods)


def _sgd_kernel(
    weights: "torch.Tensor",
    gradient: "torch.Tensor",
    group: dict[str, Any],
    state: dict[str, Any],
) -> None:
    import torch

    torch._fused_sgd_(
        [weights],
        [gradient],
        [state["momentum_buffer"]] if group["momentum"] else [],
        weight_decay=group["weight_decay"],
        lr=group["lr"],
        momentum=group["momentum"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=False,
        is_first_step=False,
    )


def _adam_kernel(
    weights: "torch.Tensor",
    gradient: "torch.Tensor",
    group: dict[str, Any],
    state: dict[str, Any],
) -> None:
    import torch

    state["step"] += 1
    beta1, beta2 = group["betas"]
    update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    update(
        [weights],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def set_lr(optimizer: "torch.optim.Optimizer", lr: float) -> None:
    """Sets the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def settings_of(settings: StepSettings, group: int) -> Settings:
    """Returns the settings of one group of parameters."""
    return settings[group] if isinstance(settings, Sequence) else Settings(settings)


def use_settings(optimizer: "torch.optim.Optimizer", settings: Settings) -> None:
    """Sets what the next step is taken with."""
    set_lr(optimizer, settings.lr)
    for group in optimizer.param_groups:
        group.update(settings.others)


def state_of(
    optimizer: "torch.optim.Optimizer", parameters: "Iterable[torch.Tensor]"
) -> "dict[str, torch.Tensor]":
    """Returns the optimizer's state of the parameters, on the CPU, by name.

    State with an entry for each element of a parameter becomes one flat vector, in the order of the
    parameters. `step`, a count, becomes [1].
    """
    import torch

    states = [(p, optimizer.state.get(p, {})) for p in parameters]
    names: set[str] = set()
    for _, state in states:
        names.update(name for name, value in state.items() if value is not None)
    vectors = {}
    for name in sorted(names):
        if name == COUNT:
            counts = [float(state[name]) for _, state in states if name in state]
            vectors[name] = torch.tensor([max(counts)])
        else:
            values = [state.get(name, torch.zeros_like(p)) for p, state in states]
            vectors[name] = torch.cat([value.detach().flatten().cpu() for value in values])
    return vectors


def put_together(
    parts: "Iterable[tuple[int, Mapping[str, torch.Tensor]]]", elements: int
) -> "dict[str, torch.Tensor]":
    """Joins the states of parts of the flat vector into one, as `state_of` returns it.

    Args:
        parts: where in the flat vector a part begins, and `state_of` of it, in any order.
        elements: of the flat vector. What no part has is zero.
    """
    import torch

    together: dict[str, torch.Tensor] = {}
    for start, state in parts:
        for name, values in state.items():
            if name == COUNT:
                together[name] = torch.maximum(together.get(name, values), values)
                continue
            whole = together.setdefault(name, torch.zeros(elements))
            whole[start : start + len(values)] = values
    return together


def check_vectors(state: "Mapping[str, torch.Tensor]", elements: int) -> None:
    """Checks that the vectors of a snapshot fit the weights.

    Raises:
        ValueError: a vector has another number of elements.
    """
    for name, values in state.items():
        if name != COUNT and len(values) != elements:
            raise ValueError(f"{name} has {len(values):,} elements for {elements:,} weights")


def restore_state(
    optimizer: "torch.optim.Optimizer",
    parameters: "Sequence[torch.Tensor]",
    state: "Mapping[str, torch.Tensor]",
) -> None:
    """Sets the optimizer's state to what `state_of` returned.

    The parameters may have been cut differently then.

    Args:
        state: the vectors by name. Names with a dot do not belong to the optimizer.

    Raises:
        ValueError: a vector does not have as many elements as the parameters.
    """
    import torch

    total = sum(p.numel() for p in parameters)
    state = {name: values for name, values in state.items() if "." not in name}
    check_vectors(state, total)
    start = 0
    counts_on_device: set[int] = set()  # the ids of parameters
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            counts_on_device.update(map(id, group["params"]))
    for p in parameters:
        own = {}
        for name, values in state.items():
            if name == COUNT:
                # Other kernels read the count on the processor, and would wait for a GPU.
                device = p.device if id(p) in counts_on_device else torch.device("cpu")
                own[name] = values[0].to(device, copy=True)
                continue
            own_values = values[start : start + p.numel()].view(p.shape)
            # Fused kernels need the parameter's memory layout.
            own[name] = torch.empty_like(p).copy_(own_values)
        if own:
            optimizer.state[p] = own
        start += p.numel()


def schedule(config: RunConfig, steps: int | None) -> str:
    """Returns the schedule of `lr_at` in words. Equal words mean equal learning rates."""
    if config.schedule == "step":
        words = f"times {config.step_factor:g} every {config.step_epochs} epochs"
    elif config.falls_as_cosine and steps:
        words = f"cosine over {steps} steps"
    else:
        words = "constant"
    if config.warm_up_steps:
        words += f"{WARM_UP}{config.warm_up_steps}"
    return words


def lr_at(config: RunConfig, step: int, epoch: int, steps: int | None) -> float:
    """Returns the learning rate of a step.

    `cosine` falls from lr to nearly 0 (Loshchilov & Hutter, 2017, arXiv:1608.03983, eq. 5, without
    restarts). Warm-up multiplies it by step / warmup in the first steps (Goyal et al., 2017,
    arXiv:1706.02677, section 2.2).

    Args:
        step, epoch: from 1.
        steps: how many steps training has; None if that is not known.
    """
    warm = min(1.0, step / (config.warm_up_steps or 1))
    if config.schedule == "step":
        return warm * config.lr * config.step_factor ** ((epoch - 1) // config.step_epochs)
    if config.falls_as_cosine and steps:
        return warm * config.lr * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
    return warm * config.lr
