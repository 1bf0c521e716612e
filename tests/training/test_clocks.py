"""How far clocks are apart, as ranks on machines of their own find it out."""

import threading
import time

import torch
from helpers.workers import on_each

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.rings.local_update import LocalUpdate
from hvdtrain.job.training import clocks

AHEAD = [100.0, 107.5, 80.0, 100.0]  # of some clock, in seconds: those of four workers
MACHINES = [1, 2, 3, 1]


def test_the_first_worker_knows_how_far_clocks_are_apart_and_how_well(tmp_path, monkeypatch):
    here, now = threading.local(), time.perf_counter

    class Clock:
        perf_counter = staticmethod(lambda: now() + AHEAD[here.worker])

    monkeypatch.setattr(clocks, "time", Clock)
    monkeypatch.setattr(clocks, "own_clock", lambda: MACHINES[here.worker])

    def compare(group, world):
        here.worker = world.worker
        job = Job(RunConfig(mode="ddp"), world, tmp_path, torch.device("cpu"), 1)
        return clocks.compare_clocks(job, LocalUpdate(job, group))

    first, *others = on_each(len(AHEAD), compare)
    assert others == [{}] * 3
    assert first[0] == first[3] == (0.0, 0.0)  # one machine's is one clock
    for rank in (1, 2):
        ahead, uncertainty = first[rank]
        assert abs(ahead - (AHEAD[rank] - AHEAD[0])) <= uncertainty < 1
