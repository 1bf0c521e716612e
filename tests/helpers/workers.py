"""Workers that agree through a store, each a thread."""

from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.store_group import StoreGroup


def on_each(workers, work, store=None):
    """What `work` comes to with the group of each of so many workers of one host."""
    store = store or HashStore()
    worlds = [World("mpirun", worker, workers, worker, workers) for worker in range(workers)]
    groups = [StoreGroup(world, store if workers > 1 else None, 30) for world in worlds]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, groups, worlds, timeout=50))
