"""The shared memory of ranks that have met, in one process: it opens its own memory as a peer's."""

import threading

import torch

from hvdtrain.base.world.place import World
from hvdtrain.job.wire.shared import SharedMemory


def met(*numbers, size=2, local_size=None):
    """The memory of these ranks, the first a server's, when they have met."""
    store, found = torch.distributed.HashStore(), {}

    def join(rank):
        found[rank] = SharedMemory()
        world = World(
            rank=rank, size=size, local_rank=rank, local_size=local_size or size, servers=1
        )
        found[rank].join(world, store, 20.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in numbers]
