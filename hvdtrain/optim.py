"""The optimizers a job can name, on a worker's parameters or on a server's flat shard alike."""

from collections.abc import Iterable

import torch

from hvdtrain.config import RunConfig


def make_optimizer(config: RunConfig, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """torch.optim's own. All work element by element, so a cut of the weights changes no result."""
    lr, decay = config.lr, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return kind(parameters, lr=lr, weight_decay=decay)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
