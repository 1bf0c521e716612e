"""The optimizer that a script hands in: what it may be, and how its `step` becomes the job's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.base.errors import Failure
from hvdtrain.base.numerics.optimizers import Settings, restore_state, state_of

# By class, the name of the optimizer and the entries of param_groups that a step is taken with.
_KINDS: Mapping[type, tuple[str, tuple[str, ...]]] = {
    torch.optim.SGD: ("sgd", ("weight_decay", "momentum", "nesterov")),
    torch.optim.Adam: ("adam", ("weight_decay", "betas", "eps")),
    torch.optim.AdamW: ("adamw", ("weight_decay", "betas", "eps")),
}
# Entries that have to be off: no mode but those with the script's own optimizer could obey them.
_OFF = ("dampening", "maximize", "amsgrad", "differentiable", "capturable")


class HandedIn:
    """An optimizer of a script.

    Args:
        optimizer: of torch.optim.

    Attributes:
        optimizer: the same.
        name: its name here: `sgd`, `adam` or `adamw`.
        parameters: those that are trained, group by group.

    Raises:
        Failure: the optimizer, or one of its settings or parameters, is not supported.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.name, self._entries = _kind_of(optimizer)
        self._groups = [
            [p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups
        ]
        # Of each group with something to train, its place among all.
        self._trained = [place for place, group in enumerate(self._groups) if group]
        self.parameters = [p for place in self._trained for p in self._groups[place]]
        if not self.parameters:
            raise Failure("the optimizer has no parameter to train: all are frozen, or it has none")
        self.settings()

    def borders(self) -> list[int]:
        """Returns the elements of the flat vector at which another group begins."""
        borders = [0]
        for place in self._trained:
            borders.append(borders[-1] + sum(p.numel() for p in self._groups[place]))
        return borders[1:-1]

    def settings(self) -> tuple[Settings, ...]:
        """Returns what the groups say now.

        Raises:
            Failure: a group has a setting that cannot be had.
        """
        return tuple(self._settings_of(place) for place in self._trained)

    def _settings_of(self, place: int) -> Settings:
        group = self.optimizer.param_groups[place]
        for name in _OFF:
            if group.get(name):
                raise Failure(
                    f"{type(self.optimizer).__name__} with {name}={group[name]} (group {place}) "
                    "cannot be had in every mode: leave it out"
                )
        others = {name: _plain(group[name]) for name in self._entries}
        return Settings(float(group["lr"]), others)

    def check_unchanged(self) -> None:
        """Checks that the same parameters are trained as when the optimizer was handed in.

        Raises:
            Failure: the script has added a group since, or frozen a parameter, or the reverse.
        """
        groups = self.optimizer.param_groups
        number = sum(p.requires_grad for group in groups for p in group["params"])
        if len(groups) != len(self._groups) or number != len(self.parameters):
            raise Failure(
                "the optimizer trains other parameters than when it was prepared: add groups, and "
                "freeze or unfreeze parameters, before prepare"
            )

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the state of the script's own optimizer: see numerics.optimizers.state_of."""
        return state_of(self.optimizer, self.parameters)

    def restore(
        self, settings: Sequence[Mapping[str, Any]], state: Mapping[str, torch.Tensor]
    ) -> None:
        """Takes over settings of the groups, and the state that `state` returned.

        Raises:
            ValueError: they are of other parameters.
        """
        for place, saved in zip(self._trained, settings, strict=True):
            self.optimizer.param_groups[place].update({"lr": saved["lr"], **saved["others"]})
        restore_state(self.optimizer, self.parameters, state)

    def options(self) -> dict[str, Any]:
        """Returns the fields of RunConfig that make the same optimizer, by the first group."""
        first = self.settings()[0]
        options = {"optimizer": self.name, "lr": first.lr}
        named = ("weight_decay", "momentum", "nesterov")
        return options | {name: first.others[name] for name in named if name in first.others}


def _kind_of(optimizer: Any) -> tuple[str, tuple[str, ...]]:
    kinds = ", ".join(kind.__name__ for kind in _KINDS)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Failure(
            f"prepare takes models and then their optimizer, of torch.optim: {kinds}; "
            f"the last it was given is of type {type(optimizer).__name__}"
        )
    found = _KINDS.get(type(optimizer))
    is_adamw = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    if found and is_adamw:
        return _KINDS[torch.optim.AdamW]
    if not found:
        raise Failure(
            f"the optimizer is {type(optimizer).__name__}: rings and servers both have {kinds}"
        )
    return found


def _plain(value: Any) -> Any:
    """Returns a setting as it travels: numbers, and lists of them."""
    if isinstance(value, tuple | list):
        return [float(one) for one in value]
    return value if isinstance(value, bool) else float(value)


def take_over(
    optimizer: torch.optim.Optimizer, step: Callable[[], None], synchronize: Callable[[], None]
) -> Callable[[], None]:
    """Has the optimizer's `step` and `synchronize` call these.

    It stays the same object, so that schedulers made before and after this hold it.

    Returns:
        A function that takes the optimizer's own step.
    """
    kind = type(optimizer)
    own_step = kind.step

    def stepping(self: torch.optim.Optimizer, closure: Any = None) -> None:
        if closure is not None:
            raise Failure(
                "step takes no closure here: no mode computes gradients a second time within it"
            )
        self._opt_called = True  # type: ignore[attr-defined]  # schedulers look for it
        step()

    # Without this mark a scheduler warns that its wrapper of `step` was overwritten.
    setattr(stepping, "_wrapped_by_lr_sched", True)  # noqa: B010
    setattr(stepping, "hooked", True)  # noqa: B010
    methods = {"step": stepping, "synchronize": lambda self: synchronize()}
    optimizer.__dict__.pop("step", None)  # a scheduler's wrapper of the former step
    optimizer.__class__ = type(kind.__name__, (kind,), methods)
    return lambda: own_step(optimizer)
