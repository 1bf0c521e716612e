"""A server that comes back, in place of one that was killed: what rank.respawn forks for that."""

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hvdtrain.coordination.join_info import JoinInfo
from hvdtrain.launch.private_network import enter_network
from hvdtrain.rank.process import run_to_its_end, set_threads
from hvdtrain.runs.request import config_of
from hvdtrain.system.memory import keep_memory
from hvdtrain.world.network import WIRE_KEY, use_one_interface
from hvdtrain.world.place import RESPAWNS, World


def come_back(
    folder: Path, rank: int, job: JoinInfo, memory_fd: int, killed_at: float, network: Mapping[str, int],
    pause_s: float,
) -> None:  # fmt: skip
    """Serve in the job that runs in the folder until that is over, with all that the killed server had answered.

    Args:
        memory_fd: a file descriptor of the memory that it had: see ps.crash_memory.
        killed_at: in seconds since 1970.
        network: the job's, as private_network.network_of gives it.
        pause_s: what it does not begin before.
    """
    time.sleep(pause_s)
    config = config_of(folder)
    if job.key:
        os.environ[WIRE_KEY] = job.key
    os.environ[RESPAWNS] = "1"
    enter_network(network)
    world = World("alone", rank, job.ranks, rank, job.ranks if job.is_local else 1, config.servers)
    use_one_interface(world)
    set_threads(1, is_server=True)
    keep_memory()
    import torch

    from hvdtrain import modes
    from hvdtrain.coordination.job import Job
    from hvdtrain.ps.serve import KilledServer
    from hvdtrain.system import trace
    from hvdtrain.training import device

    torch.set_num_threads(1)
    device.set_up(config)
    if config.trace:
        trace.begin(config.trace_steps)
    own = Job(config, world, folder, device.choose_device(config, world), 1)
    killed = KilledServer(memory_fd, (job.host, job.port), killed_at)
    serve = modes.load(config.mode).serve
    run_to_its_end(lambda terminal: serve(own, partial(print, file=terminal.out), killed=killed), folder, world)
