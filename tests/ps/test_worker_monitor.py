"""Who of the workers is there, as a server sees to it."""

import threading
import time

import pytest
import torch
from helpers.buckets import make_server

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.job import Job
from hvdtrain.job.ps.worker_monitor import WorkerMonitor


class WatchedWire:
    """Lets the test say how a rank has ended.

    Attributes:
        ended: by rank, who is told so.
    """

    condition = threading.Condition

    def __init__(self):
        self.ended, self.endpoints = {}, {}

    def watch(self, rank, timeout, ended):
        self.ended[rank] = ended

    def ask(self, rank, method, *arguments):
        pass


@pytest.mark.parametrize("server", [0, 1])
def test_every_server_ends_when_all_workers_are_lost(server, tmp_path):
    world = World("mpirun", server, 4, server, 4, servers=2)
    job = Job(
        RunConfig(mode="ps-async", servers=2, timeout=60.0), world, tmp_path, torch.device("cpu"), 1
    )
    served, wire = make_server(workers=2), WatchedWire()
    served.handle(served.roster, served.roster.know, {"began": True})
    monitor = WorkerMonitor(job, wire, ("127.0.0.1", 1), served, print, is_open=False)
    for rank in (2, 3):
        wire.ended[rank]("its connection ended")
    began = time.monotonic()
    with pytest.raises(Failure, match="^rank 3, the last worker, is lost: its connection ended$"):
        monitor.until_all_have_ended()
    monitor.close()
    assert time.monotonic() - began < 30
