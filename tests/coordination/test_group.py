"""What workers of which none may be lost agree on, through a store."""

import threading

import pytest
import torch
from helpers.workers import on_each
from torch.distributed import HashStore

from hvdtrain.base.errors import Failure
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.store_group import StoreGroup

WORKERS, TIMES = 3, 20


class CountedStore(HashStore):
    """Knows how often each thread read it."""

    def __init__(self):
        super().__init__()
        self.readers = []

    def multi_get(self, keys):
        self.readers.append(threading.current_thread())
        return super().multi_get(keys)


def test_what_is_gathered_again_and_again_is_read_at_once_by_the_first_alone_and_does_not_pile_up():
    def gathered(group, world):
        given = {"worker": group.worker, "nan": float("nan")}
        return [group.gather_to_first(given | {"time": time}) for time in range(TIMES)]

    store = CountedStore()
    first, *others = on_each(WORKERS, gathered, store)
    assert others == [[{}] * TIMES] * (WORKERS - 1)
    for time, found in enumerate(first):
        assert [(worker, its["worker"], its["time"]) for worker, its in found.items()] == [
            (worker, worker, time) for worker in range(WORKERS)
        ]
    assert len(store.readers) == TIMES and len(set(store.readers)) == 1
    assert store.num_keys() == 4 * WORKERS


def test_sums_and_rows_are_the_same_on_all_workers():
    def agreed(group, world):
        later = group.sum_later(torch.full((2, 3), group.worker + 0.5))
        total = later()
        group.all_gather([])
        there, rows = group.all_gather([group.worker, -1.5])
        return total, there, rows, group.any(group.worker == 1), group.any(False)

    for total, there, rows, one, none in on_each(WORKERS, agreed):
        assert total.equal(torch.full((2, 3), 4.5)) and there == [0, 1, 2]
        assert rows.tolist() == [[0, -1.5], [1, -1.5], [2, -1.5]] and one and not none


def test_a_sum_may_be_under_way_while_workers_come_to_others():
    """The second worker takes it when the first has been through three more: nobody has to be as
    fast.
    """

    def agreed(group, world):
        later = group.sum_later(torch.ones(1))
        group.any(False)
        if not group.leads:
            assert ahead.wait(10)
        total, following = later(), group.sum_later(torch.ones(1))
        group.sum_later(torch.ones(1))
        ahead.set()
        return total.item(), following().item()

    ahead = threading.Event()
    assert on_each(2, agreed) == [(2, 2)] * 2


def test_workers_that_are_silent_are_named():
    group = StoreGroup(World("env", 0, 3), HashStore(), 0.2)
    with pytest.raises(
        Failure, match=r"^ranks 1, 2 are lost: no sign of life within 0.2 s \(see --timeout\)"
    ):
        group.barrier()
