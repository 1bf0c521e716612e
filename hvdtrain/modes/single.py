"""One process, no communication: the baseline."""

import torch
from torch import nn

from hvdtrain.job import Job
from hvdtrain.optim import make_optimizer, set_lr


class LocalUpdate:
    """What `single`, `allreduce` and `ddp` share: each worker applies the same update to its own weights."""

    lockstep = True
    pushed = None
    waited_s = 0.0
    optimizer: torch.optim.Optimizer

    def begin(self, step: int, lr: float) -> None:
        set_lr(self.optimizer, lr)

    def update(self) -> None:
        self.optimizer.step()

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
        self.optimizer = make_optimizer(self.config, model.parameters())
        return model

    def wait(self) -> None:
        pass

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def close(self) -> None:
        pass


connect = Single
