"""What the modes share whose workers each apply the update."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hvdtrain.buckets.local_steps import LocalSteps, LocalSynchroniser
from hvdtrain.buckets.partition import cut
from hvdtrain.coordination.group import Group
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.synchroniser import ring_traffic
from hvdtrain.numerics.flat import flatten_weights, trained
from hvdtrain.numerics.optimizers import make_exchange_optimizer, restore_state, set_lr, state_of


class LocalUpdate(LocalSynchroniser):
    """What modes share whose workers all apply the same update to their own weights.

    A mode with several workers adds `average`, and calls `prepare` when all have the first one's weights.

    Attributes:
        message: payload bytes of a step's gradients, as they are averaged.
        local: with --local-steps, which has the inner optimizer; `optimizer` is the outer one then.
    """

    message = 0.0
    optimizer: torch.optim.Optimizer
    parameters: list[Any]
    waited_s = 0.0

    def __init__(self, job: Job, group: Group) -> None:
        self.config, self.world, self.group, self.steps = job.config, job.world, group, job.steps
        # Of buckets that are under way: Δ, in their order, and what waits for the mean of all workers' in it.
        self._averaged: dict[tuple[int, ...], tuple[torch.Tensor, Callable[[], object]]] = {}

    def prepare(self, model: nn.Module) -> nn.Module:
        self.parameters = trained(model)
        if self.config.local_steps:
            sizes = [p.numel() for p in self.parameters]
            pieces = cut(sizes, 1, self.config.bucket_elements, self.config.fragments)
            self.local = LocalSteps(self.config, model, flatten_weights(model), pieces)
            self.parameters = [self.local.outer[piece.start : piece.stop] for piece in pieces]
        self.optimizer = make_exchange_optimizer(self.config, self.parameters, self.world.workers)
        return model

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
            self.waited_s = 0.0
            self.local.begin_step()
            self._take_outer_step(tuple(self.local.due))
            self.local.begin(lr)
        else:
            set_lr(self.optimizer, lr)

    def update(self) -> None:
        if not self.local:
            self.optimizer.step()
            return
        if leaving := self.local.step():
            delta = torch.cat([self.local.difference(number) for number in leaving])
            self._averaged[tuple(leaving)] = delta, self.average(delta)

    def _take_outer_step(self, numbers: tuple[int, ...]) -> None:
        """Take the outer step of these buckets, if Δ of them is under way."""
        if numbers not in self._averaged:
            return
        began = time.perf_counter()
        delta, wait = self._averaged.pop(numbers)
        wait()
        parts = [self.parameters[number] for number in numbers]
        for part, gradient in zip(parts, delta.split([len(part) for part in parts]), strict=True):
            part.grad = gradient
        self.optimizer.step()
        for part in parts:
            part.grad = None
        self.waited_s = time.perf_counter() - began

    def refresh(self) -> None:
        if self.local:
            for numbers in [*self._averaged]:
                self._take_outer_step(numbers)
            self.local.show_outer()

    def traffic(self, steps: int) -> tuple[int, int]:
        return ring_traffic(self.world.size, 4 * self.local.sent if self.local else steps * self.message)
