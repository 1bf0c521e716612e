"""What workers give to the one that leads."""

from concurrent.futures import ThreadPoolExecutor

from helpers.buckets import make_desk
from helpers.groups import Threads
from torch.distributed import HashStore

from hvdtrain.world.place import World

WORKERS, TIMES = 3, 20


class CountedStore(HashStore):
    """Knows its keys, and how often it was read."""

    def __init__(self):
        super().__init__()
        self.keys, self.reads = set(), 0

    def set(self, key, value):
        self.keys.add(key)
        super().set(key, value)

    def get(self, key):
        self.reads += 1
        return super().get(key)

    def multi_get(self, keys):
        self.reads += 1
        return super().multi_get(keys)


def test_what_is_gathered_again_and_again_is_read_at_once_and_does_not_pile_up():
    """However much later the first worker reads than the others go on."""
    desk, store = make_desk(workers=WORKERS), CountedStore()

    def gathered(worker):
        group = Threads(World("env", worker, WORKERS), desk, store)
        return [group.gather_to_first({"worker": worker, "time": time, "nan": float("nan")}) for time in range(TIMES)]

    with ThreadPoolExecutor(WORKERS) as pool:
        first, *others = [done.result(timeout=30) for done in [pool.submit(gathered, w) for w in range(WORKERS)]]
    assert others == [[{}] * TIMES] * (WORKERS - 1)
    for time, found in enumerate(first):
        assert [(worker, its["worker"], its["time"]) for worker, its in found.items()] == [
            (worker, worker, time) for worker in range(WORKERS)
        ]
    assert store.reads == TIMES and len(store.keys) == 2 * WORKERS
