"""What the modes share whose workers each apply the update."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from hvdtrain.coordination.group import Group
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.synchroniser import Synchroniser, ring_traffic
from hvdtrain.numerics.flat import trained
from hvdtrain.numerics.optimizers import make_optimizer, restore_state, set_lr, state_of


class LocalUpdate(Synchroniser):
    """What modes share whose workers all apply the same update to their own weights.

    Such a mode adds `group` and `prepare`, which makes `optimizer`, and as far as gradients are not averaged in
    backward itself, `wait` and `update`.

    Attributes:
        message: payload bytes of a step's gradients, as they are averaged.
    """

    message = 0.0
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]

    def __init__(self, job: Job, group: Group) -> None:
        self.config, self.world, self.group, self.steps = job.config, job.world, group, job.steps

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.parameters = trained(model)
        return make_optimizer(self.config, self.parameters)

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        restore_state(self.optimizer, self.parameters, state)

    def optimizer_parts(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        start = 0
        for p in self.parameters if self.group.leads else ():
            yield start, state_of(self.optimizer, [p])
            start += p.numel()

    def begin(self, step: int, lr: float) -> None:
        set_lr(self.optimizer, lr)

    def update(self) -> None:
        self.optimizer.step()

    def traffic(self, steps: int) -> tuple[int, int]:
        return ring_traffic(self.world.size, steps * self.message)
