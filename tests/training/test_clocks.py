"""How far clocks are apart, as ranks on machines of their own find it out."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.job import Job
from hvdtrain.coordination.store_group import StoreGroup
from hvdtrain.modes.single import Single
from hvdtrain.training import clocks
from hvdtrain.world.place import World

AHEAD = [100.0, 107.5, 80.0, 100.0]  # of some clock, in seconds: those of four workers
MACHINES = [1, 2, 3, 1]


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """What each worker, a thread with a clock of its own, finds."""
    here, store, now = threading.local(), HashStore(), time.perf_counter

    class Clock:
        perf_counter = staticmethod(lambda: now() + AHEAD[here.worker])

    monkeypatch.setattr(clocks, "time", Clock)
    monkeypatch.setattr(clocks, "own_clock", lambda: MACHINES[here.worker])

    def one(worker):
        here.worker = worker
        world = World("env", worker, len(AHEAD))
        job = Job(RunConfig(mode="ddp"), world, tmp_path, torch.device("cpu"), 1)
        return clocks.compare_clocks(job, Single(job, StoreGroup(world, store, 30)))

    def all_of_them():
        with ThreadPoolExecutor(len(AHEAD)) as pool:
            return [done.result(timeout=30) for done in [pool.submit(one, worker) for worker in range(len(AHEAD))]]

    return all_of_them


def test_the_first_worker_knows_how_far_clocks_are_apart_and_how_well(compare):
    first, *others = compare()
    assert others == [{}] * 3
    assert first[0] == first[3] == (0.0, 0.0)  # one machine's is one clock
    for rank in (1, 2):
        ahead, uncertainty = first[rank]
        assert abs(ahead - (AHEAD[rank] - AHEAD[0])) <= uncertainty < 1
