"""torch DistributedDataParallel over Gloo or NCCL: the all-reduce people would use without Horovod."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from hvdtrain.flat import payload_bytes
from hvdtrain.job import Job
from hvdtrain.modes.single import LocalUpdate
from hvdtrain.optim import make_optimizer
from hvdtrain.rendezvous import open_store, part


class Ddp(LocalUpdate):
    def __init__(self, job: Job) -> None:
        self.config, self.world = job.config, job.world
        self.backend = "cpu:gloo,cuda:nccl" if job.device.type == "cuda" else "gloo"
        self.store = open_store(job.world, job.config.timeout)
        dist.init_process_group(
            self.backend, store=self.store, rank=job.world.rank, world_size=job.world.size,
            timeout=timedelta(seconds=job.config.timeout),
        )  # fmt: skip

    def prepare(self, model: nn.Module) -> nn.Module:
        self.bytes_per_step = 2.0 * (self.world.size - 1) * payload_bytes(model)
        self.optimizer = make_optimizer(self.config, model.parameters())
        # Buffers are averaged before an evaluation, as in every mode, not copied from one rank at every step.
        return nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)

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
