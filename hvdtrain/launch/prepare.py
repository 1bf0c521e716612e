"""Turning a training job's options, or a program, into the command that starts the job."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.base import modes
from hvdtrain.base.config.recipes import Launcher
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.system.own_code import file_of, with_file
from hvdtrain.base.world import network
from hvdtrain.base.world.network import WIRE_KEY, new_wire_key
from hvdtrain.base.world.place import ELASTIC, RESPAWNS, SLOTS
from hvdtrain.launch import testbed
from hvdtrain.launch.forked_rank import forked_program
from hvdtrain.launch.hosts import Host, code_path
from hvdtrain.launch.memory import BASE_MB, rank_mb, requested_mb
from hvdtrain.launch.preflight import Requirements, check_hosts
from hvdtrain.launch.private_network import needs_network
from hvdtrain.launch.recipe import JobSpec, LaunchCommand, expand, join_program, train_program
from hvdtrain.runs.launched import LAUNCHER, Launched, Pair
from hvdtrain.runs.request import with_absolute_paths


@dataclass(frozen=True)
class TrainingJob:
    """A training job that is to be started.

    Attributes:
        hosts: each with the slots that the job uses. Empty if the launcher finds hosts itself.
        out: the run folder.
        working_folder: where ranks start on the hosts, a copy of the code; by default the current
            folder.
        interface: the network interface by which hosts reach each other; by default
            HVDTRAIN_INTERFACE, or one is chosen.
        resume: whether to continue the run in the folder, as after a failure.
        all_options: whether to give the ranks every option, since the run folder may have other
            values.
        secrets: variables for every rank that no command line may show.
        respawn: whether workers that are lost will be started again.
        elastic: whether a ring goes on without workers that are lost.
        fork_server: the socket of the process that the ranks are forked from; empty if each is a
            new interpreter. See forking.fork_server.
    """

    config: RunConfig
    workers: int
    hosts: Sequence[Host]
    out: Path
    working_folder: str = ""
    interface: str = ""
    resume: bool = False
    all_options: bool = False
    secrets: Mapping[str, str] | None = None
    respawn: bool = False
    elastic: bool = False
    fork_server: str = ""


def prepare(
    recipe: Launcher, job: TrainingJob, check: bool = True, measure: bool = False
) -> LaunchCommand:
    """Returns the command that starts a training job.

    Args:
        check: whether to check the hosts first, if the launcher needs them. A scheduler knows its
            hosts.
        measure: whether to measure the network between checked hosts, for the manifest.

    Raises:
        UsageError: a host cannot run the job, or the launcher needs hosts.
    """
    run_folder = job.out  # as the ranks see it
    if recipe.runs:  # ranks see other folders than this machine
        _check_paths(recipe.name, job.config)
        run_folder = Path(recipe.runs, job.out.name)
    memory_mb = requested_mb(job.config, job.workers)
    required = requirements(job.config, job.workers, job.out, job.working_folder)
    config = _with_code_in(job.working_folder, with_absolute_paths(job.config))
    program = train_program(config, run_folder, job.all_options, recipe.interpreter)
    if job.resume:
        program.append("--resume")
    if job.fork_server:
        program = forked_program(job.fork_server, program)
    if recipe.script_name:  # not every scheduler passes the environment on
        program = ["env", f"{LAUNCHER}={recipe.name}@{recipe.digest}", *program]
    secrets = dict(job.secrets or {})
    if config.wire == "zmq" or job.elastic:
        secrets[WIRE_KEY] = os.environ.get(WIRE_KEY) or new_wire_key()
    environment = {}
    if job.elastic:
        environment[ELASTIC] = "1"
    elif job.respawn:
        environment[RESPAWNS] = "1"
    spec = JobSpec(
        ranks=job.workers + config.servers,
        program=program,
        servers=config.servers,
        hosts=job.hosts,
        out=job.out,
        interface=job.interface,
        working_folder=job.working_folder,
        survives_lost_rank=job.elastic or modes.declared(config.mode).survives_lost_worker,
        join=join_program(run_folder, recipe.interpreter) if job.respawn else (),
        secrets=secrets,
        needs_network=needs_network(config),
        environment=environment,
        memory_mb=memory_mb,
        gpus=int(config.device == "cuda"),
    )
    return prepare_program(recipe, spec, required, check, measure)


def requirements(
    config: RunConfig, workers: int, out: Path, working_folder: str = ""
) -> Requirements:
    """Returns the requirements of a training job on each host; see prepare."""
    config = _with_code_in(working_folder, with_absolute_paths(config))
    places = (config.dataset, config.model, config.pretrained, config.script)
    files = [str(file_of(place) or place) for place in places if place.startswith("/")]
    least_mb = rank_mb(config, workers)
    return Requirements(
        working_folder,
        out,
        files,
        least_mb,
        disk_mb=least_mb - BASE_MB,
        cuda=config.device == "cuda",
    )


def _with_code_in(working_folder: str, config: RunConfig) -> RunConfig:
    """Returns the configuration with the user's files in the copy of the current folder."""
    if not working_folder:
        return config
    here = Path.cwd()
    moved: dict[str, Any] = {}
    for name in ("model", "dataset"):
        value = getattr(config, name)
        file = file_of(value)
        if file and file.is_relative_to(here):
            moved[name] = with_file(value, Path(working_folder, file.relative_to(here)))
    if config.script and Path(config.script).is_relative_to(here):
        moved["script"] = str(Path(working_folder, Path(config.script).relative_to(here)))
    return dataclasses.replace(config, **moved)


def _check_paths(launcher: str, config: RunConfig) -> None:
    """Checks that files are not named from this machine's current folder, unknown to the ranks.

    Raises:
        UsageError: a file is.
    """
    given = (
        ("--dataset", config.dataset),
        ("--model", config.model),
        ("--pretrained", config.pretrained),
        ("--script", config.script),
    )
    for option, path in given:
        if path.startswith("/"):
            continue
        is_relative_path = "/" in path and "://" not in path
        if path.startswith((".", "~")) or file_of(path) or is_relative_path:
            raise UsageError(
                f"{option} {path} is on this machine: --launcher {launcher} runs elsewhere, give "
                "its path there, from /"
            )


def prepare_program(
    recipe: Launcher,
    spec: JobSpec,
    requirements: Requirements,
    check: bool = True,
    measure: bool = False,
) -> LaunchCommand:
    """Returns the command that starts a job of any program of ours.

    Args:
        spec: the job. `interface` and `environment` are completed.
        requirements: what the hosts are checked for, if `check` is true.
        measure: see prepare.

    Raises:
        UsageError: see prepare.
    """
    environment = dict(spec.environment)
    if spec.working_folder:
        environment["PYTHONPATH"] = code_path(spec.working_folder)
    interface = spec.interface or os.environ.get(network.VARIABLE, "")
    network_pairs: tuple[Pair, ...] = ()
    nodes = set(testbed.running_nodes()) & {host.name for host in spec.hosts}
    if nodes:
        interface = interface or testbed.set_of(min(nodes)).interface
        # Virtual hosts share memory, which rpc would find and use.
        environment["HVDTRAIN_OVER_TCP"] = "1"
    if spec.hosts and check and recipe.hosts == "needed":
        required = dataclasses.replace(requirements, interface=interface)
        chosen, network_pairs = check_hosts(spec.hosts, required, measure)
        interface = chosen or interface
    hosts = tuple(map(str, spec.hosts))
    launched = Launched(
        recipe.name, hosts, interface, spec.working_folder, network_pairs, recipe.digest
    )
    environment |= launched.variables()
    if spec.servers and spec.hosts:
        # horovodrun numbers ranks host by host. By this variable ranks spread the servers.
        environment[SLOTS] = ",".join(str(host.slots) for host in spec.hosts)
    return expand(recipe, dataclasses.replace(spec, interface=interface, environment=environment))
