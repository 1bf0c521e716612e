"""A worker that joins a job that runs: in place of one that was lost, or beside the others."""

import os
import time
from pathlib import Path

from hvdtrain import modes
from hvdtrain.coordination.join_info import JoinInfo, read_join_info
from hvdtrain.errors import Failure, UsageError
from hvdtrain.launch.private_network import enter_network, network_of
from hvdtrain.rank.process import run_to_its_end, set_threads
from hvdtrain.runs.request import check_joinable, check_trusted, config_of
from hvdtrain.runs.schema import Manifest, find
from hvdtrain.system.memory import keep_memory
from hvdtrain.world.host import boot_id
from hvdtrain.world.network import WIRE_KEY, use_one_interface
from hvdtrain.world.place import RESPAWNS, World


def join_run(folder: Path, trusts: bool = False) -> None:
    """Train with the workers of the job that runs in the folder, until it is over, or SIGTERM. It takes the place of a
    worker that is lost, or a new one.

    Args:
        trusts: import what code the folder names.

    Raises:
        UsageError: there is no such job, nobody can join it, or the images here are others.
        Failure: it cannot be reached, or ended meanwhile.
    """
    config = config_of(folder)
    check_joinable(config, "--join", is_elastic=True)  # else there is nobody to ask
    check_trusted(vars(config), (), trusts, folder)
    known = read_join_info(folder)
    if known.key:
        os.environ[WIRE_KEY] = known.key
    if known.servers_return:
        os.environ[RESPAWNS] = "1"
    if known.is_local:
        _go_there(known, folder)
    here = World(rank=-1, size=known.ranks, local_size=known.ranks if known.is_local else 1, servers=config.servers)
    use_one_interface(here)
    facts = _manifest(folder, config.timeout)
    threads = facts.threads_per_worker or 1
    set_threads(threads, is_server=False)
    if config.servers:
        keep_memory()
    import torch

    from hvdtrain.coordination.job import Job
    from hvdtrain.coordination.joining import arrive
    from hvdtrain.data.find import find_dataset
    from hvdtrain.data.identity import identity
    from hvdtrain.models.own import code_hash
    from hvdtrain.rank import work
    from hvdtrain.system import trace
    from hvdtrain.training import device

    data = find_dataset(config.dataset, config.skip_bad)
    if (found := identity(data)) != facts.dataset_hash:
        raise UsageError(f"{config.dataset} is other data here than in {folder}: {found}, not {facts.dataset_hash}")
    torch.set_num_threads(threads)
    device.set_up(config)
    if config.trace:
        trace.begin(config.trace_steps)
    chosen = device.choose_device(config, here)
    inputs = work.trial_inputs(config, data)
    model = work.initial_model(config, len(data.classes), inputs)
    if (found_code := code_hash(config.model)) != facts.model_hash:
        raise UsageError(f"{config.model} is other code here than in {folder}: {found_code}, not {facts.model_hash}")
    if config.pretrained:
        work.load_weights(model, config)
    modes.load(config.mode)
    arrival = arrive(config, known.host, known.port, known.ranks, known.is_local)  # now it is waited for
    steps, wait_for = config.total_steps(len(data.train)), work.waits_for(config, model, inputs)
    job = Job(config, arrival.world, folder, chosen, threads, arrival.store, steps, wait_for)
    run_to_its_end(
        lambda terminal: work.train_as_worker(job, data, model, None, None, terminal, arrival), folder, arrival.world
    )


def _go_there(known: JoinInfo, folder: Path) -> None:
    """Enter the network of a job that is all on this machine. UsageError where it is on another, or another user's."""
    if known.boot != boot_id():
        raise UsageError(f"the job of {folder} runs on one machine alone, and this is another: join it there")
    try:
        enter_network(network_of(known.pid))
    except (FileNotFoundError, ProcessLookupError):
        raise UsageError(f"{folder} has no job to join: it has ended") from None
    except OSError as error:
        raise UsageError(f"the network of the job of {folder} cannot be entered: {error.strerror or error}") from None


def _manifest(folder: Path, seconds: float) -> Manifest:
    """The run's manifest, which its first worker writes when all have met."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := find(folder, Manifest):
            return found
        time.sleep(0.1)
    raise Failure(f"{folder} had no manifest.json within {seconds:.0f} s")
