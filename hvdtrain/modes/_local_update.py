"""What the modes share whose workers each apply the update."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hvdtrain.buckets.local_steps import LocalSteps
from hvdtrain.coordination.group import Group
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.synchroniser import Synchroniser, ring_traffic
from hvdtrain.numerics.flat import flatten_weights, trained
from hvdtrain.numerics.optimizers import make_exchange_optimizer, restore_state, set_lr, state_of


class LocalUpdate(Synchroniser):
    """What modes share whose workers all apply the same update to their own weights.

    Such a mode adds `group` and `prepare`, which calls `begin_with` when every worker has the first one's weights, and
    where there are several workers `average`.

    Attributes:
        message: payload bytes of a step's gradients, as they are averaged.
        local: with --local-steps, which has the inner optimizer; `optimizer` is the outer one then.
    """

    message = 0.0
    optimizer: torch.optim.Optimizer
    parameters: list[Any]
    local: LocalSteps | None = None

    def __init__(self, job: Job, group: Group) -> None:
        self.config, self.world, self.group, self.steps = job.config, job.world, group, job.steps
        self._averaged: Callable[[], object] | None = None  # waits for Δ of all workers, if that is under way
        self._waited_s = 0.0

    def begin_with(self, model: nn.Module) -> None:
        """Make what updates these weights."""
        if self.config.local_steps:
            self.local = LocalSteps(self.config, model, flatten_weights(model))
        self.parameters = [self.local.outer] if self.local else trained(model)
        self.optimizer = make_exchange_optimizer(self.config, self.parameters, self.world.workers)

    def average(self, values: torch.Tensor) -> Callable[[], object]:
        """Have the mean of all workers' values in them, once what is returned has been called."""
        return lambda: None

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        if self.local:
            state = self.local.restore(step, state, self.world.worker)
        restore_state(self.optimizer, self.parameters, state)

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        start = 0
        for p in self.parameters if self.group.leads else ():
            yield start, state_of(self.optimizer, [p])
            start += p.numel()
        if self.local:
            yield from self.local.parts(self.group)

    def begin(self, step: int, lr: float) -> None:
        if self.local:
            self._waited_s = 0.0
            self._end_round()
            self.local.begin(lr)
        else:
            set_lr(self.optimizer, lr)

    def update(self) -> None:
        if not self.local:
            self.optimizer.step()
            return
        self.local.step()
        if self.local.is_over:
            self.local.outer.grad = self.local.difference()
            self._averaged = self.average(self.local.outer.grad)

    def _end_round(self) -> None:
        """Take the outer step, where a round is over."""
        if self.local and self._averaged:
            began = time.perf_counter()
            self._averaged()
            self._averaged, self._waited_s = None, time.perf_counter() - began
            self.optimizer.step()
            self.local.outer.grad = None
            self.local.begin_round()

    def refresh(self) -> None:
        if self.local:
            self._end_round()
            self.local.show_outer()

    @property
    def waited_s(self) -> float:
        return self._waited_s

    @property
    def ended_round(self) -> bool:
        return self.local is not None and self.local.is_over

    def traffic(self, steps: int) -> tuple[int, int]:
        return ring_traffic(self.world.size, (self.local.rounds if self.local else steps) * self.message)
