"""The workers of a job as Horovod knows them."""

import json
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.coordination.group import Group
from hvdtrain.wire import horovod
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
        self.backend = horovod.join(world, store)
        self._store = store  # which other ranks may still be reading from

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return horovod.total(values)

    def gather_to_first(self, value: Any) -> dict[int, Any]:
        """As in Group, without a store, which not every starter's ranks have."""
        return dict(enumerate(map(json.loads, horovod.to_first(json.dumps(value).encode()))))

    def close(self) -> None:
        horovod.leave()
