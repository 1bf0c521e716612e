"""A worker that joins a running job, in place of a lost worker or as one more."""

import os
import socket
import time
from pathlib import Path

from hvdtrain.base import modes
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.system.memory import keep_memory
from hvdtrain.base.system.terminal import Terminal
from hvdtrain.base.world.host import boot_id
from hvdtrain.base.world.network import WIRE_KEY, use_one_interface
from hvdtrain.base.world.place import RESPAWNS, World
from hvdtrain.job.rank.process import hide_gpus, run_to_its_end, set_threads
from hvdtrain.job.wire.descriptors import allow_descriptors
from hvdtrain.launch.private_network import enter_network, network_of
from hvdtrain.runs.join_info import JoinInfo, read_join_info
from hvdtrain.runs.request import check_joinable, check_starts_again, check_trusted, read_run_config
from hvdtrain.runs.schema import Manifest, find

LOOK_EVERY_S = 0.2  # the pause between two looks for the manifest


def join_run(folder: Path, trusts: bool = False) -> None:
    """Trains with the workers of a running job until the job is over, or a SIGTERM comes.

    The worker gets the rank of a lost worker, or a new one.

    Args:
        folder: the run folder of the job.
        trusts: whether to import the code that the run's configuration names.

    Raises:
        UsageError: there is no such job, nobody can join it, or the images or the model's code are
            not the same here.
        Failure: the job cannot be reached, or has ended meanwhile.
    """
    config = read_run_config(folder)
    # Whether a ring is elastic, its join file tells: without it nobody can join.
    check_joinable(config, "--join", is_elastic=True)
    check_starts_again(config.mode)
    check_trusted(vars(config), (), trusts, folder)
    known = read_join_info(folder)
    if known.key:
        os.environ[WIRE_KEY] = known.key
    if known.servers_return:
        os.environ[RESPAWNS] = "1"
    if known.is_local:
        _enter_network(known, folder)
    here = World(
        rank=-1,
        size=known.ranks,
        local_size=known.ranks if known.is_local else 1,
        servers=config.servers,
    )
    use_one_interface(here)
    allow_descriptors(config, here)
    manifest = _wait_for_manifest(folder, known, config.timeout)
    threads = manifest.threads_per_worker or 1
    set_threads(threads, is_server=False)
    hide_gpus(config, is_server=False)
    keep_memory()
    import torch

    from hvdtrain.base.system import trace
    from hvdtrain.data.find import find_dataset_of
    from hvdtrain.data.identity import identity
    from hvdtrain.job.coordination.job import Job
    from hvdtrain.job.coordination.joining import arrive
    from hvdtrain.job.rank.worker import train_as_worker
    from hvdtrain.job.training import device
    from hvdtrain.job.training import model as training_model
    from hvdtrain.models.own import code_hash

    data = find_dataset_of(config)
    dataset_hash = identity(data)
    if dataset_hash != manifest.dataset_hash:
        raise UsageError(
            f"the data of {config.dataset} differs from the data of {folder}: "
            f"{dataset_hash}, not {manifest.dataset_hash}"
        )
    torch.set_num_threads(threads)
    device.set_up(config)
    if config.trace:
        trace.begin(config.trace_steps)
    chosen = device.choose_device(config, here)
    inputs = training_model.trial_inputs(config, data)
    model = training_model.initial_model(config, len(data.classes), inputs)
    model_hash = code_hash(config.model)
    if model_hash != manifest.model_hash:
        raise UsageError(
            f"{config.model} is other code here than in {folder}: "
            f"{model_hash}, not {manifest.model_hash}"
        )
    if config.pretrained:
        training_model.load_weights(model, config)
    modes.load(config.mode)  # imported now, while nobody waits
    steps = config.total_steps(len(data.train))
    wait_for = training_model.waits_for(config, model, inputs)
    # From here on the other workers wait for this one.
    arrival = arrive(config, known.host, known.port, known.ranks, known.is_local)
    job = Job(config, arrival.world, folder, chosen, threads, arrival.store, steps, wait_for)

    def run(terminal: Terminal) -> None:
        train_as_worker(job, data, model, terminal, arrival=arrival)

    run_to_its_end(run, folder, arrival.world)


def _enter_network(known: JoinInfo, folder: Path) -> None:
    """Enters the network of a job that runs on one machine.

    Raises:
        UsageError: the job runs on another machine or has ended, or its network is another user's.
    """
    if known.boot != boot_id():
        raise UsageError(
            f"the job of {folder} runs on one machine alone, and this is another: join it there"
        )
    try:
        enter_network(network_of(known.pid))
    except (FileNotFoundError, ProcessLookupError):
        raise UsageError(f"{folder} has no job to join: it has ended") from None
    except OSError as error:
        raise UsageError(
            f"the network of the job of {folder} cannot be entered: {error.strerror or error}"
        ) from None


def _wait_for_manifest(folder: Path, known: JoinInfo, timeout: float) -> Manifest:
    """Returns the run's manifest, once it is there.

    The first worker writes the manifest when all workers are ready to train. That may take any
    time, as long as the job can be reached.

    Args:
        folder: the run folder of the job.
        known: where the job's store is.
        timeout: seconds after which the job is lost if it does not answer.

    Raises:
        Failure: the job has ended.
    """
    while True:
        found = find(folder, Manifest)
        if found:
            return found
        try:
            socket.create_connection((known.host, known.port), timeout).close()
        except OSError:
            raise Failure(
                f"{folder} has no job to join: it has ended before it began to train"
            ) from None
        time.sleep(LOOK_EVERY_S)
