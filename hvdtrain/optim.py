"""The optimizers a job can name, on a worker's parameters or on a server's flat shard alike."""

import math
from collections.abc import Iterable

import torch

from hvdtrain.config import RunConfig


def make_optimizer(config: RunConfig, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """torch.optim's own, fused: one pass over memory. All work element by element, so a cut of the weights
    over servers changes no result."""
    lr, decay = config.lr, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=lr, momentum=config.momentum, weight_decay=decay, nesterov=config.nesterov, fused=True
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return kind(parameters, lr=lr, weight_decay=decay, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def schedule(config: RunConfig, steps: int | None) -> str:
    """How lr_at goes on over so many steps, in words: equal words, equal learning rates."""
    how = "constant" if config.schedule == "constant" or steps is None else f"{config.schedule} over {steps} steps"
    return f"{how}, warm-up over {config.warmup}" if config.warmup else how


def lr_at(config: RunConfig, step: int, steps: int | None) -> float:
    """The learning rate of a step (from 1) of `steps`, or of nobody knows how many (None).

    `cosine` falls from lr to nearly 0 (Loshchilov & Hutter, 2017, arXiv:1608.03983, eq. 5, without restarts). Warm-up
    multiplies it by step / warmup in the first steps (Goyal et al., 2017, arXiv:1706.02677, section 2.2).
    """
    warm = min(1.0, step / config.warmup) if config.warmup else 1.0
    if config.schedule == "constant" or steps is None:
        return warm * config.lr
    return warm * config.lr * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
