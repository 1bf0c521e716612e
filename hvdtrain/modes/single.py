"""One process, no communication: the baseline."""

from collections.abc import Mapping

import torch
from torch import nn

from hvdtrain.config import RunConfig
from hvdtrain.flat import trained
from hvdtrain.job import Job
from hvdtrain.optim import make_optimizer, restore_state, set_lr, state_of
from hvdtrain.precision import LossScale


class LocalUpdate:
    """What `single`, `allreduce` and `ddp` share: each worker applies the same update to its own weights."""

    lockstep = True
    pushed = None
    waited_s = 0.0
    config: RunConfig
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]

    def _make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.parameters = trained(model)
        return make_optimizer(self.config, self.parameters)

    def restore(self, step: int, state: Mapping[str, torch.Tensor]) -> None:
        restore_state(self.optimizer, self.parameters, state)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return state_of(self.optimizer, self.parameters)

    def more_to_come(self, more: bool) -> None:
        pass

    def begin(self, step: int, lr: float) -> None:
        set_lr(self.optimizer, lr)

    def update(self, loss_scale: LossScale) -> None:
        loss_scale.step(self.optimizer.step)

    def refresh(self) -> None:
        pass

    def servers_rss_mb(self) -> float:
        return 0.0

    def server_hosts(self) -> list[str]:
        return []


class Single(LocalUpdate):
    backend = "none"
    bytes_per_step = 0.0

    def __init__(self, job: Job) -> None:
        self.config = job.config

    def prepare(self, model: nn.Module) -> nn.Module:
        self.optimizer = self._make_optimizer(model)
        return model

    def wait(self) -> None:
        pass

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def close(self) -> None:
        pass


connect = Single
