"""The base of the modes whose workers each apply the whole update."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.base.numerics.clock import Stopwatch, Stretch
from hvdtrain.base.numerics.flat import trained
from hvdtrain.base.numerics.optimizers import (
    StepSettings,
    make_exchange_optimizer,
    restore_state,
    set_lr,
    settings_of,
    state_of,
    use_settings,
)
from hvdtrain.job.buckets.gradient_check import GradientCheck
from hvdtrain.job.buckets.local_rounds import BucketCarrier
from hvdtrain.job.buckets.partition import BucketRange, cut
from hvdtrain.job.coordination.group import Group
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.coordination.synchroniser import NO_STATE, OwnState, ring_traffic


class LocalUpdate(BucketCarrier):
    """A synchroniser whose workers all apply the same update to their own weights.

    A mode with several workers adds `average`, and calls `prepare` or `carry` when all have the
    first worker's weights.

    Args:
        job: the job as this rank knows it.
        group: this worker and the others.

    Attributes:
        message: payload bytes of a step's gradients, as they are averaged.
        carried: payload bytes of all buckets that were sent.
        parameters: what the optimizer changes: the model's parameters, or the buckets of `carry`.
        gradient_check: checks that each parameter has its gradient in every step, where a missing
            one would have others wait.
    """

    message = 0.0
    carried = 0
    optimizer: torch.optim.Optimizer
    parameters: list[Any]
    waits: Sequence[Stretch] = ()
    gradient_check: GradientCheck | None = None

    def __init__(self, job: Job, group: Group) -> None:
        self.config = job.config
        self.world = job.world
        self.group = group
        self.steps = job.steps
        self.stopwatch = Stopwatch(job.device)
        # By the numbers of the buckets that are under way together: their values, one after the
        # other, and what waits until these are the mean over the workers.
        self._averaged: dict[tuple[int, ...], tuple[torch.Tensor, Callable[[], object]]] = {}

    def prepare(self, model: nn.Module) -> nn.Module:
        self._make_optimizer(trained(model))
        return model

    def carry(self, sizes: Sequence[int], weights: torch.Tensor) -> Sequence[BucketRange]:
        buckets = cut(sizes, 1, self.config.bucket_elements, self.config.fragments)
        self._make_optimizer([weights[bucket.start : bucket.stop] for bucket in buckets])
        return buckets

    def _make_optimizer(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.optimizer = make_exchange_optimizer(self.config, parameters, self.world.workers)

    def average(self, values: torch.Tensor) -> Callable[[], object]:
        """Begins to average values over the workers, in place.

        Returns:
            A function that blocks until the mean is there.
        """
        return lambda: None

    def restore(
        self, step: int, state: Mapping[str, torch.Tensor], own: OwnState = NO_STATE
    ) -> None:
        restore_state(self.optimizer, self.parameters, state)

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        if not self.group.leads:
            return
        start = 0
        for p in self.parameters:
            yield start, state_of(self.optimizer, [p])
            start += p.numel()

    def begin(self, step: int, lr: float) -> None:
        set_lr(self.optimizer, lr)

    def update(self) -> None:
        self.optimizer.step()

    def begin_carrying(self, lr: StepSettings, buckets: int, is_new_step: bool) -> None:
        use_settings(self.optimizer, settings_of(lr, 0))
        self.waits = ()

    def send(self, values: Mapping[int, torch.Tensor]) -> None:
        together = torch.cat([*values.values()])
        self.carried += together.nbytes
        self._averaged[tuple(values)] = together, self.average(together)

    def wait_for(self, numbers: Sequence[int]) -> None:
        """Takes the optimizer's step of buckets that were sent together, if they are under way."""
        found = self._averaged.pop(tuple(numbers), None)
        if found is None:
            return
        mean, wait = found
        began = self.stopwatch.now()
        wait()  # over NCCL, the GPU waits, and nobody here
        self.waits = [(began, self.stopwatch.now())]
        parts = [self.parameters[number] for number in numbers]
        gradients = mean.split([len(part) for part in parts])
        for part, gradient in zip(parts, gradients, strict=True):
            part.grad = gradient
        self.optimizer.step()
        for part in parts:
            part.grad = None

    def refresh(self) -> None:
        for numbers in [*self._averaged]:
            self.wait_for(numbers)

    def mean_over_workers(self, values: torch.Tensor) -> torch.Tensor:
        self.group.barrier()  # which names a worker that does not come
        wait = self.average(values)
        wait()
        return values

    def traffic(self, steps: int) -> tuple[int, int]:
        return ring_traffic(self.world.size, steps * self.message + self.carried)
