"""A server in place of a killed one, in a process that rank.respawn has forked."""

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hvdtrain.base.system.memory import keep_memory
from hvdtrain.base.system.terminal import Terminal
from hvdtrain.base.world.network import WIRE_KEY, use_one_interface
from hvdtrain.base.world.place import RESPAWNS, World
from hvdtrain.job.rank.process import hide_gpus, run_to_its_end, set_threads
from hvdtrain.job.wire.descriptors import allow_descriptors
from hvdtrain.launch.private_network import enter_network
from hvdtrain.runs.join_info import JoinInfo
from hvdtrain.runs.request import read_run_config


def come_back(
    folder: Path,
    rank: int,
    job: JoinInfo,
    memory_fd: int,
    killed_at: float,
    network: Mapping[str, int],
    pause_s: float,
) -> None:
    """Serves in a running job until the job is over, with the state of a killed server.

    Args:
        folder: the run folder of the job.
        rank: the rank of the killed server.
        job: how to reach the job.
        memory_fd: a file descriptor of the memory with the server's state: see ps.crash_memory.
        killed_at: when the server was killed, in seconds since 1970.
        network: the job's network, as private_network.network_of returns it.
        pause_s: the seconds to wait before this server begins.
    """
    time.sleep(pause_s)
    config = read_run_config(folder)
    if job.key:
        os.environ[WIRE_KEY] = job.key
    os.environ[RESPAWNS] = "1"
    enter_network(network)
    local_size = job.ranks if job.is_local else 1
    world = World("alone", rank, job.ranks, rank, local_size, config.servers)
    use_one_interface(world)
    allow_descriptors(config, world)
    set_threads(1, is_server=True)
    hide_gpus(config, is_server=True)
    keep_memory()
    import torch

    from hvdtrain.base import modes
    from hvdtrain.base.system import trace
    from hvdtrain.job.coordination.job import Job
    from hvdtrain.job.ps.serve import KilledServer
    from hvdtrain.job.training import device

    torch.set_num_threads(1)
    device.set_up(config)
    if config.trace:
        trace.begin(config.trace_steps)
    own_job = Job(config, world, folder, device.choose_device(config, world), 1)
    killed = KilledServer(memory_fd, (job.host, job.port), killed_at)
    mode = modes.load(config.mode)

    def run(terminal: Terminal) -> None:
        mode.serve(own_job, partial(print, file=terminal.out), killed=killed)

    run_to_its_end(run, folder, world)
