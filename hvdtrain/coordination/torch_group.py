"""The workers of a job as a process group of torch.distributed."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.coordination.group import Group
from hvdtrain.wire.rendezvous import leave
from hvdtrain.world.place import World


class TorchGroup(Group):
    """Joins torch's default process group, which DistributedDataParallel uses too.

    Args:
        backend: as torch names it: `gloo`, or `cpu:gloo,cuda:nccl`.
        timeout: seconds after which a wait for another rank fails.
        store: which all ranks share.
    """

    def __init__(self, world: World, backend: str, timeout: float, store: "dist.Store") -> None:
        super().__init__(world)
        self.world, self.timeout, self.store = world, timeout, store
        dist.init_process_group(
            backend, store=self.store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout)
        )

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    def gather_to_first(self, value: Any) -> dict[int, Any]:
        return self.gather_through_store(self.store, value)

    def close(self) -> None:
        everybody = range(self.world.size)
        leave(self.world.rank, self.store, self.timeout, everybody, everybody)
        dist.destroy_process_group()
