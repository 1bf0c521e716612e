"""The workers of a job as Horovod knows them."""

import json
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch

from hvdtrain.coordination.group import Group
from hvdtrain.wire.horovod import join, leave, wait_asleep
from hvdtrain.world.place import World

if TYPE_CHECKING:
    from torch.distributed import Store


class HorovodGroup(Group):
    """
    Args:
        store: see wire.horovod.join.

    Attributes:
        backend: what carries Horovod's tensors.
    """

    def __init__(self, world: World, store: "Store | None") -> None:
        super().__init__(world)
        self.backend = join(world, store)
        self._store = store  # which other ranks may still be reading from

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        handle = hvd.allreduce_async(values, op=hvd.Sum, name="sum")
        wait_asleep([handle])
        return hvd.synchronize(handle)

    def gather_to_first(self, value: Any) -> dict[int, Any]:
        """As in Group, without a store, which not every starter's ranks have: an all-to-all of which all is for the
        first.
        """
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        to_each = torch.tensor([len(own), *[0] * (self.workers - 1)], dtype=torch.int32)
        handle = hvd.alltoall_async(own, to_each, name="gather")
        wait_asleep([handle])
        received, of_each = hvd.synchronize(handle)
        if not self.leads:
            return {}
        parts = received.split(of_each.tolist())
        return {worker: json.loads(part.numpy().tobytes()) for worker, part in enumerate(parts)}

    def close(self) -> None:
        leave()
