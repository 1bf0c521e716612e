"""torch DistributedDataParallel over Gloo or NCCL: the all-reduce people would use without Horovod."""

import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hvdtrain.flat import payload_bytes
from hvdtrain.job import Job
from hvdtrain.modes.single import LocalUpdate
from hvdtrain.rendezvous import open_store, part


class Ddp(LocalUpdate):
    def __init__(self, job: Job) -> None:
        self.config, self.world = job.config, job.world
        with_nccl = job.device.type == "cuda" and not job.config.share_gpu
        self.backend = "cpu:gloo,cuda:nccl" if with_nccl else "gloo"
        self.store = open_store(job.world, job.config.timeout)
        dist.init_process_group(
            self.backend, store=self.store, rank=job.world.rank, world_size=job.world.size,
            timeout=timedelta(seconds=job.config.timeout),
        )  # fmt: skip

    def prepare(self, model: nn.Module) -> nn.Module:
        self.bytes_per_step = 2.0 * (self.world.size - 1) * payload_bytes(model)
        self.optimizer = self._make_optimizer(model)
        # Buffers are averaged before an evaluation, as in every mode, not copied from one rank at every step.
        wrap: Any = nn.parallel.DistributedDataParallel
        no_copies = "forward_sync_buffers"  # torch 2.11 calls it broadcast_buffers
        if no_copies not in inspect.signature(wrap).parameters:
            no_copies = "broadcast_buffers"
        self.module = wrap(model, **{no_copies: False})
        return self.module

    def more_to_come(self, more: bool) -> None:
        self.module.require_backward_grad_sync = not more  # what its no_sync() sets

    def wait(self) -> None:
        """Nothing: DDP's own wait is the end of backward(), after the last gradient, where the clock sees it."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    def close(self) -> None:
        part(self.world, self.store, self.config.timeout)
        dist.destroy_process_group()


connect = Ddp
